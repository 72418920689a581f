"""report: a batch's forecast against what became of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from chorus_batch.jobs.cli.estimate import FIGURES
from chorus_batch.jobs.cli.session import Session, output_options, print_json, print_table

if TYPE_CHECKING:
    from chorus_batch.jobs.report import Line


@click.command()
@click.argument("batch")
@output_options
@click.pass_context
def report(ctx: click.Context, batch: str, as_json: bool, quiet: bool) -> None:
    """Show what a batch was expected to take when it was submitted, what it took, and the deviation.

    Deviations are shown when all of its jobs are done. Wall time runs from the first claim to the last video, and
    compares if as many workers ran the batch as it was planned for.
    """
    from chorus_batch.jobs import statistics
    from chorus_batch.jobs.database import transaction
    from chorus_batch.jobs.report import compared

    with transaction(Session.of(ctx).database) as connection:
        batch_id = statistics.find_batch(connection, batch)
        stored, fact = statistics.forecast_and_fact(connection, batch_id)
    lines = compared(stored, fact)
    if as_json:
        figures = {line.figure: {k: v for k, v in asdict(line).items() if k != "figure"} for line in lines}
        print_json({**asdict(fact), "bytes": fact.bytes, "figures": figures, "forecast": dict(stored)})
    elif quiet:
        click.echo(fact.batch_id)
    else:
        state = "" if fact.over else ", not over yet"
        click.echo(f"{fact.name}: {fact.done} of {fact.total} done by {fact.workers} workers{state}")
        titles = {"what": "FIGURE", "forecast": "FORECAST", "range": "RANGE", "fact": "FACT", "deviation": "DEVIATION"}
        print_table(list(map(_row, lines)), titles)
        for basis in stored.get("basis", ()):
            click.echo(f"forecast of seconds and bytes: {basis}")


def _row(line: Line) -> dict[str, str]:
    title, tell = FIGURES.get(line.figure, (line.figure.replace("_", " "), lambda value: f"{value:.0f}"))
    deviation = "" if line.deviation is None else f"{100 * line.deviation:+.1f} %"
    if line.within is False:
        deviation += " out of range"
    return {
        "what": title.partition(",")[0] if line.figure == "wall_seconds" else title,
        "forecast": "unknown" if line.expected is None else tell(line.expected),
        "range": "" if line.low is None or line.high is None else f"{tell(line.low)} .. {tell(line.high)}",
        "fact": "" if line.fact is None else tell(line.fact),
        "deviation": deviation.strip(),
    }


COMMANDS = {"report": report}
