"""submit: files of prompts become a batch."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from chorus_batch.jobs.cli.estimate import print_forecast, to_bytes
from chorus_batch.jobs.cli.reading import ingest_options, reading_options
from chorus_batch.jobs.cli.session import Session, output_options, print_json

if TYPE_CHECKING:
    from chorus_batch.jobs.submission import Submitted


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--name", help="The batch's name; the file's name and the date if left out.")
@click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="A label; repeatable.")
@reading_options
@click.option("--truncate", is_flag=True, help="Accept prompts that the model doesn't read to their end.")
@click.option("--max-gpu-hours", metavar="X", help="Begin no more jobs when they took so many hours of workers.")
@click.option("--deadline", metavar="T", help="Begin no more jobs from this time on: 2026-04-13T06:00, 06:00 or 8h.")
@click.option("--new", is_flag=True, help="Submit files again that were submitted before.")
@click.option("--dry-run", is_flag=True, help="Validate and plan; store nothing.")
@click.option(
    "--device-memory",
    type=click.FloatRange(0, min_open=True),
    metavar="GIB",
    help="With --dry-run: of the device that will run it.",
)
@click.option("--wait", is_flag=True, help="Wait until it is over; in the local profile this runs a worker.")
@click.option("-o", "--output", type=click.Path(), help="With --wait: download the videos into this folder.")
@output_options
@click.pass_context
def submit(ctx: click.Context, /, files: tuple[str, ...], **options: Any) -> int:
    """Submit files of prompts (CSV, TSV, TXT, JSONL; - is standard input) as one batch."""
    session = Session.of(ctx)
    from chorus_batch.jobs.ingest.rows import open_source, parse_pairs
    from chorus_batch.jobs.limits import parse_budget, parse_deadline

    ingest = ingest_options(session, options, truncate=options["truncate"])
    budget, until = options["max_gpu_hours"], options["deadline"]
    max_seconds = parse_budget(budget) if budget is not None else None
    deadline = parse_deadline(until) if until is not None else None
    labels = parse_pairs("--label", options["labels"])
    if options["wait"] and not options["dry_run"]:
        # While rows are read and embedded, the worker starts and loads its libraries: that takes it longest.
        ctx.with_resource(_worker(session))
    from chorus_batch.jobs.models import CacheMode
    from chorus_batch.jobs.outlook import Terms
    from chorus_batch.jobs.submission import SubmitOptions, submit

    wanted = SubmitOptions(
        name=options["name"],
        labels=labels,
        cache=CacheMode(options["cache"]),
        on_invalid=options["on_invalid"],
        new=options["new"],
        max_seconds=max_seconds,
        deadline=deadline,
    )
    with ExitStack() as stack:
        sources = [stack.enter_context(open_source(name, sys.stdin.buffer)) for name in files]
        terms = Terms(device_memory=to_bytes(options["device_memory"]))
        dry_run = options["dry_run"]
        done = submit(session.settings, session.database, sources, ingest, wanted, dry_run=dry_run, terms=terms)
        _tell(done)
        if done.batch_id is None:
            _print(done, options["as_json"], options["quiet"])
            return 0
        from chorus_batch.jobs.dispatch import nudge

        nudge(session.settings)
        if not options["wait"]:
            _print(done, options["as_json"], options["quiet"])
            return 0
        return _wait(session, done, options)


def _worker(session: Session) -> Any:
    from chorus_batch.jobs.companion import worker_if_alone

    session.database  # the schema must be there before a worker looks at it  # noqa: B018
    return worker_if_alone(session.settings, session.database)


def _wait(session: Session, done: Submitted, options: dict[str, Any]) -> int:
    from chorus_batch.jobs.local.profile import ensure
    from chorus_batch.jobs.progress import exit_code, follow, line

    assert done.batch_id is not None

    def look_after() -> None:
        ensure(session.asked)  # a server that died is started again

    progress = follow(session.database, done.batch_id, look_after=look_after)
    if options["output"]:
        from chorus_batch.jobs.cli.results import download

        download(session, done.batch_id, Path(options["output"]))
    if options["as_json"]:
        print_json({**asdict(progress), "forecast": asdict(done.forecast)})
    else:
        click.echo(done.batch_id if options["quiet"] else line(progress))
    return exit_code(progress)


def _tell(done: Submitted) -> None:
    """What happened to the rows, and what becomes of them, for a person."""
    for note in done.notes:
        click.echo(f"note: {note}", err=True)
    for error in done.errors:
        click.echo(f"left out: {error}", err=True)
    forecast = done.forecast
    saved = 100 * forecast.steps_skipped / (forecast.steps_total or 1)
    click.echo(
        f"{done.name}: {forecast.rows} videos: {forecast.sources} computed in full, {forecast.followers} from others'"
        f" latents ({forecast.followers_of_cache} of earlier batches), {forecast.duplicates} duplicates;"
        f" {saved:.0f} % of the steps saved",
        err=True,
    )


def _print(done: Submitted, as_json: bool, quiet: bool) -> None:
    if as_json:
        print_json(done)
    elif done.batch_id is None:
        print_forecast(done.forecast)
        click.echo("valid; nothing was stored (--dry-run)")
    else:
        click.echo(done.batch_id if quiet else f"batch {done.batch_id} ({done.name}): {done.forecast.rows} jobs")


COMMANDS = {"submit": submit}
