"""results: a batch's files on a person's disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from chorus_batch.jobs.cli.session import Session, output_options, print_json

KINDS = ("video", "latents", "sidecar", "sheet")


@click.command()
@click.argument("batch")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help="The folder; made if it isn't there."
)
@click.option("--what", default="video", show_default=True, help="video, latents, sidecar, sheet: any, with commas.")
@click.option("--manifest", type=click.Choice(["jsonl", "csv"]), default="jsonl", show_default=True)
@click.option("--name-template", default="{id}-{slug}", show_default=True, help="File names: {id} {row} {seed} {slug}.")
@click.option(
    "--presign", type=int, metavar="SECONDS", help="Don't download: put links that work for so long in the manifest."
)
@output_options
@click.pass_context
def results(
    ctx: click.Context, /, batch: str, output: Path, what: str, as_json: bool, quiet: bool, **options: Any
) -> int:
    """Download a batch's videos with a manifest. Files that are there are kept; safe to run while it goes on."""
    from chorus_batch.jobs import statistics
    from chorus_batch.jobs.database import transaction
    from chorus_batch.jobs.errors import UsageError

    wanted = [kind.strip() for kind in what.split(",")]
    if unknown := set(wanted) - set(KINDS):
        raise UsageError(f"--what {', '.join(unknown)}", hint=f"use {', '.join(KINDS)}, with commas between")
    session = Session.of(ctx)
    with transaction(session.database) as connection:
        batch_id = statistics.find_batch(connection, batch)
    summary = download(session, batch_id, output, wanted, **options)
    if as_json:
        print_json(summary)
    elif quiet:
        click.echo(summary["manifest"])
    else:
        click.echo(f"{summary['files']} files ({summary['fetched']} fetched), manifest {summary['manifest']}")
    return 1 if summary["lost"] else 0


def download(
    session: Session,
    batch_id: int,
    folder: Path,
    what: list[str] | None = None,
    *,
    manifest: str = "jsonl",
    name_template: str = "{id}-{slug}",
    presign: int | None = None,
) -> dict[str, Any]:
    """Bring a batch's files and its manifest into `folder`; says what was done."""
    from chorus_batch.jobs import statistics
    from chorus_batch.jobs.database import transaction
    from chorus_batch.jobs.results.delivery import Delivering, deliver
    from chorus_batch.jobs.storage import ObjectStore

    with transaction(session.database) as connection:
        rows = list(statistics.jobs(connection, batch_id))
    order = Delivering(folder, tuple(what or ["video"]), manifest, name_template, presign)
    done = deliver(ObjectStore.from_settings(session.settings), rows, order)
    for message in done.lost:
        click.echo(f"lost: {message}", err=True)
    return {"files": done.files, "fetched": done.fetched, "manifest": str(done.manifest), "lost": done.lost}


COMMANDS = {"results": results}
