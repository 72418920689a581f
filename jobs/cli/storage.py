"""storage: look after the object store."""

from __future__ import annotations

import click

from chorus_batch.jobs.cli.session import Session, output_options, print_json, print_table


@click.group()
def storage() -> None:
    """Look after the object store."""


@storage.command()
@click.option("--dry-run", is_flag=True, help="Say what would be removed.")
@click.option(
    "--older-than",
    metavar="AGE",
    default="7d",
    show_default=True,
    help="Leave what was written since; text features of batches submitted since are kept, too.",
)
@click.option("--yes", is_flag=True, help="Don't ask.")
@output_options
@click.pass_context
def gc(ctx: click.Context, dry_run: bool, older_than: str, yes: bool, as_json: bool, quiet: bool) -> None:
    """Remove objects that nobody will ask for.

    Those are what died with a worker before it was published, checkpoints of jobs that ended without them, evicted
    entries and their masks, and text features of no recent batch. Videos and latents of finished jobs stay. The bucket
    must be this database's own.
    """
    from chorus_batch.jobs import garbage
    from chorus_batch.jobs.database import transaction
    from chorus_batch.jobs.errors import Conflict
    from chorus_batch.jobs.limits import parse_age
    from chorus_batch.jobs.storage import ObjectStore

    before = parse_age(older_than)
    session = Session.of(ctx)
    store = ObjectStore.from_settings(session.settings)
    store.ensure_bucket()
    listed = garbage.listing(store)
    with transaction(session.database) as connection:
        needed = garbage.references(connection, before)
    found = garbage.sweep(listed, needed, before)
    if found.garbage and not needed.known:
        raise Conflict(
            f"the database knows of no batch, but there are {found.listed} objects in {session.settings.s3_bucket}",
            hint="check CHORUS_DATABASE_URL and CHORUS_S3_BUCKET; nothing was removed",
        )
    if found.garbage and not dry_run:
        if not yes:
            click.confirm(f"Remove {len(found.garbage)} objects, {found.freed} bytes?", abort=True, err=True)
        store.remove(each.key for each in found.garbage)
    row = {
        "dry_run": dry_run,
        "objects": found.listed,
        "bytes": found.size,
        "garbage": len(found.garbage),
        "garbage_bytes": found.freed,
        "too_young": found.young,
    }
    if as_json:
        print_json(row)
    elif quiet:
        for each in found.garbage:
            click.echo(each.key)
    else:
        titles = {"objects": "OBJECTS", "bytes": "BYTES", "too_young": "TOO YOUNG"}
        done = "WOULD BE REMOVED" if dry_run else "REMOVED"
        print_table([row], {**titles, "garbage": done, "garbage_bytes": "BYTES"})


COMMANDS = {"storage": storage}
