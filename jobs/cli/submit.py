"""submit: files of prompts become a batch."""

from __future__ import annotations

import secrets
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from chorus_batch.jobs.cli.session import Session, output_options, print_json
from chorus_batch.jobs.parameters import POLICIES

if TYPE_CHECKING:
    from chorus_batch.jobs.submission import Submitted


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--name", help="The batch's name; the file's name and the date if left out.")
@click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="A label; repeatable.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="A parameter for every row; repeatable.")
@click.option("--map", "mapping", multiple=True, metavar="THEIRS=OURS", help="What a column means; repeatable.")
@click.option("--format", "format_", default="auto", show_default=True, help="auto, csv, tsv, txt, jsonl or openai.")
@click.option("--encoding", help="The file's encoding, if it isn't UTF-8.")
@click.option("--seed-policy", default="row", show_default=True, help="row, hash or fixed:N.")
@click.option("--repeat", default=1, show_default=True, help="Videos for each row that doesn't say.")
@click.option("--dup-policy", type=click.Choice(["error", "skip", "suffix"]), default="error", show_default=True)
@click.option("--on-invalid", type=click.Choice(["file", "row"]), default="file", show_default=True,
              help="What an invalid row costs: the whole submit, or the row.")  # fmt: skip
@click.option("--priority", default=0, show_default=True, help="Of rows that don't say; higher goes first.")
@click.option("--cache", type=click.Choice(["on", "exact", "readonly", "off"]), default="on", show_default=True)
@click.option("--policy", type=click.Choice(POLICIES),
              help="What rows that don't say reuse of similar ones: nothing, the first steps, or all three stages;"
              " the model's own if left out.")  # fmt: skip
@click.option("--truncate", is_flag=True, help="Accept prompts that the model doesn't read to their end.")
@click.option("--new", is_flag=True, help="Submit files again that were submitted before.")
@click.option("--dry-run", is_flag=True, help="Validate and plan; store nothing.")
@click.option("--wait", is_flag=True, help="Wait until it is over; in the local profile this runs a worker.")
@click.option("-o", "--output", type=click.Path(), help="With --wait: download the videos into this folder.")
@output_options
@click.pass_context
def submit(ctx: click.Context, /, files: tuple[str, ...], **options: Any) -> int:
    """Submit files of prompts (CSV, TSV, TXT, JSONL; - is standard input) as one batch."""
    session = Session.of(ctx)
    from chorus_batch.jobs.cards.card import load_card
    from chorus_batch.jobs.ingest.rows import IngestOptions, open_source, parse_pairs

    ingest = IngestOptions(
        card=load_card(session.asked.model),
        format=options["format_"],
        encoding=options["encoding"],
        mapping=parse_pairs("--map", options["mapping"]),
        overrides=parse_pairs("--set", options["overrides"]),
        seed_policy=options["seed_policy"],
        repeat=options["repeat"],
        dup_policy=options["dup_policy"],
        truncate=options["truncate"],
        priority=options["priority"],
        salt=secrets.randbits(64),
        policy=options["policy"],
    )
    labels = parse_pairs("--label", options["labels"])
    if options["wait"] and not options["dry_run"]:
        # While rows are read and embedded, the worker starts and loads its libraries: that takes it longest.
        ctx.with_resource(_worker(session))
    from chorus_batch.jobs.models import CacheMode
    from chorus_batch.jobs.submission import SubmitOptions, submit

    wanted = SubmitOptions(
        name=options["name"],
        labels=labels,
        cache=CacheMode(options["cache"]),
        on_invalid=options["on_invalid"],
        new=options["new"],
    )
    with ExitStack() as stack:
        sources = [stack.enter_context(open_source(name, sys.stdin.buffer)) for name in files]
        done = submit(session.settings, session.database, sources, ingest, wanted, dry_run=options["dry_run"])
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
    """What happened to the rows, for a person."""
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
        click.echo("valid; nothing was stored (--dry-run)")
    else:
        click.echo(done.batch_id if quiet else f"batch {done.batch_id} ({done.name}): {done.forecast.rows} jobs")


COMMANDS = {"submit": submit}
