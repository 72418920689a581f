"""compare: batches of the same rows side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from chorus_batch.jobs.cli.session import Session, output_options, print_json, print_table

if TYPE_CHECKING:
    from chorus_batch.jobs.comparison import Figures


@click.command()
@click.argument("batches", nargs=-1, required=True, metavar="BATCH BATCH...")
@output_options
@click.pass_context
def compare(ctx: click.Context, batches: tuple[str, ...], as_json: bool, quiet: bool) -> None:
    """Compare batches of the same rows, for instance under another --policy; the first is the baseline.

    Only jobs that all of them finished count. They match by prompt, seed and frame rate, so a file without seeds has to
    be submitted with --seed-policy hash or fixed:N. Hits are semantic and exact ones; "on hits" means semantic ones.
    Spoiled are hits whose video lacks an attribute of its prompt and didn't in the baseline; mended the other way.
    """
    if len(batches) < 2:
        raise click.UsageError("give two batches or more; the first is the baseline")
    from chorus_batch.jobs import comparison, statistics
    from chorus_batch.jobs.database import transaction

    with transaction(Session.of(ctx).database) as connection:
        ids = [statistics.find_batch(connection, name) for name in batches]
        found = [statistics.compared(connection, batch_id) for batch_id in ids]
    figures = comparison.compare(found)
    if as_json:
        print_json({"baseline": ids[0], "matched": figures[0].matched, "batches": list(map(asdict, figures))})
    elif quiet:
        for batch_id in ids:
            click.echo(batch_id)
    else:
        _print(figures)


def _print(figures: Sequence[Figures]) -> None:
    titles = {str(n): f"{one.batch} ({one.batch_id})" for n, one in enumerate(figures)}
    told = list(_ROWS)
    if any(one.step_caches != ("none",) for one in figures):
        told.insert(1, ("step cache", lambda one: ", ".join(one.step_caches)))
    rows = [{"what": what, **{str(n): tell(one) for n, one in enumerate(figures)}} for what, tell in told]
    print_table(rows, {"what": "", **titles})


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


_ROWS: tuple[tuple[str, Callable[[Figures], str]], ...] = (
    ("policy", lambda one: ", ".join(one.policies)),
    ("jobs matched", lambda one: f"{one.matched} of {one.jobs}"),
    ("hit rate", lambda one: _share(one.hit_rate)),
    ("forward tokens", lambda one: str(one.tokens)),
    ("  of the baseline's", lambda one: _share(one.tokens_share)),
    ("denoise seconds", lambda one: f"{one.denoise_seconds:.2f}"),
    ("speed-up", lambda one: _times(one.speedup)),
    ("  on hits", lambda one: _times(one.speedup_hits)),
    ("attributes right", lambda one: _share(one.accuracy)),
    ("  on hits", lambda one: _share(one.accuracy_hits)),
    ("  baseline on these", lambda one: _share(one.baseline_accuracy_hits)),
    ("  spoiled of hits", lambda one: _share(one.spoiled)),
    ("  mended of hits", lambda one: _share(one.mended)),
)

COMMANDS = {"compare": compare}
