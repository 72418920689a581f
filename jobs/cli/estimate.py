"""estimate: what files or a stored batch will cost."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from chorus_batch.jobs.cli.reading import ingest_options, reading_options
from chorus_batch.jobs.cli.session import Session, output_options, print_json, print_table

if TYPE_CHECKING:
    from chorus_batch.jobs.forecast import Forecast
    from chorus_batch.jobs.outlook import Terms


@click.command()
@click.argument("what", metavar="FILE|BATCH")
@click.option(
    "--workers", type=click.IntRange(1), help="How many will run it; those that live now, or one, if left out."
)
@click.option("--gpu-price", type=click.FloatRange(0), metavar="P", help="What an hour of one worker costs.")
@click.option(
    "--device-memory", type=click.FloatRange(0, min_open=True), metavar="GIB", help="Of the device that will run it."
)
@reading_options
@output_options
@click.pass_context
def estimate(ctx: click.Context, /, what: str, as_json: bool, quiet: bool, **options: Any) -> None:
    """Tell what a file of prompts, or what is left of a batch, will cost: hits, steps, GPU hours, time, storage.

    Prompts are embedded and planned, as `submit` would; their vectors are all that is stored. A file is estimated even
    where its prompts are longer than the model reads. Seconds and bytes are those of the jobs that were finished here
    with the same model; of a model that was never run they're unknown.
    """
    session = Session.of(ctx)
    from chorus_batch.jobs.outlook import Terms

    terms = Terms(options["workers"], options["gpu_price"], to_bytes(options["device_memory"]))
    if what == "-" or Path(what).exists():
        name, forecast = _of_file(session, what, terms, options)
    else:
        name, forecast = _of_batch(session, what, terms)
    if as_json:
        print_json({"name": name, **forecast.plain()})
    elif quiet:
        hours = forecast.ranges["gpu_hours"]
        click.echo("unknown" if hours is None else f"{hours.expected:.6g}")
    else:
        print_forecast(forecast)


def _of_file(session: Session, what: str, terms: Terms, options: dict[str, Any]) -> tuple[str, Forecast]:
    from chorus_batch.jobs.ingest.rows import open_source
    from chorus_batch.jobs.models import CacheMode
    from chorus_batch.jobs.submission import SubmitOptions, submit

    ingest = ingest_options(session, options, truncate=True)
    # "new": what was submitted before may be estimated again.
    wanted = SubmitOptions(cache=CacheMode(options["cache"]), on_invalid=options["on_invalid"], new=True)
    with ExitStack() as stack:
        source = stack.enter_context(open_source(what, sys.stdin.buffer))
        done = submit(session.settings, session.database, [source], ingest, wanted, dry_run=True, terms=terms)
    for note in done.notes:
        click.echo(f"note: {note}", err=True)
    if any(note.kind == "truncated" for note in done.notes):
        click.echo("note: submit such a file with --truncate", err=True)
    for error in done.errors:
        click.echo(f"left out: {error}", err=True)
    return done.name, done.forecast


def _of_batch(session: Session, what: str, terms: Terms) -> tuple[str, Forecast]:
    from chorus_batch.jobs import statistics
    from chorus_batch.jobs.database import transaction
    from chorus_batch.jobs.errors import NotFound
    from chorus_batch.jobs.outlook import of_batch

    with transaction(session.database) as connection:
        try:
            batch_id = statistics.find_batch(connection, what)
        except NotFound as error:
            raise NotFound(f"there is no file and no batch {what!r}", hint=error.hint) from error
        name = statistics.progress(connection, batch_id).name
    return name, of_batch(session.settings, session.database, batch_id, terms)


def print_forecast(forecast: Forecast) -> None:
    """A table for a person, and what its seconds and bytes come from."""
    rows = []
    for name, (title, tell) in FIGURES.items():
        found = forecast.ranges.get(name)
        if name == "cost" and forecast.gpu_price is None:
            continue
        cells = dict.fromkeys(("low", "expected", "high"), "unknown") if found is None else {
            "low": tell(found.low), "expected": tell(found.expected), "high": tell(found.high)
        }  # fmt: skip
        rows.append({"what": title.format(workers=forecast.workers), **cells, "why": found.why if found else ""})
    click.echo(
        f"{forecast.rows} videos: {forecast.sources} computed in full, {forecast.followers} from others' latents"
        f" ({forecast.followers_of_cache} of earlier batches), {forecast.duplicates} duplicates,"
        f" {forecast.made_before} made before"
    )
    titles = {"what": "FIGURE", "low": "LOW", "expected": "EXPECTED", "high": "HIGH", "why": "THE RANGE COMES FROM"}
    print_table(rows, titles)
    for basis in forecast.basis:
        click.echo(f"seconds and bytes: {basis}")
    for line in forecast.memory:
        click.echo(f"memory: {line}")


def to_bytes(gib: float | None) -> int | None:
    """Bytes of GiB."""
    return None if gib is None else int(gib * 2**30)


def _count(value: float) -> str:
    return f"{value:.0f}"


def _hours(value: float) -> str:
    return f"{value:.3g}"


def clock(seconds: float) -> str:
    """Hours, minutes and seconds; under ten minutes with a decimal."""
    if seconds < 600:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def size(value: float) -> str:
    """Bytes in the unit that fits."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


# figure of a Forecast -> (what it is called, how it is written)
FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "hits": ("hits", _count),
    "steps_skipped": ("steps skipped", _count),
    "tokens_computed": ("forward tokens", _count),
    "gpu_hours": ("GPU hours", _hours),
    "wall_seconds": ("wall time, {workers} workers", clock),
    "video_bytes": ("videos", size),
    "latents_bytes": ("latents", size),
    "entry_bytes": ("cache entries", size),
    "bytes": ("storage, all", size),
    "cost": ("cost", lambda value: f"{value:.2f}"),
}

COMMANDS = {"estimate": estimate}
