"""db: the schema."""

from __future__ import annotations

import click

from chorus_batch.jobs.cli.session import Session
from chorus_batch.jobs.errors import DependencyDown


@click.group()
def db() -> None:
    """Look after the database's schema."""


@db.command()
@click.pass_context
def upgrade(ctx: click.Context) -> None:
    """Bring the schema to what this program needs. Safe while workers run: revisions only add."""
    from chorus_batch.jobs.database import current_revision

    session = Session.of(ctx)
    click.echo(current_revision(session.database))


@db.command()
@click.pass_context
def current(ctx: click.Context) -> None:
    """Show the schema's revision, and the one that this program needs."""
    from chorus_batch.jobs.database import HEAD, current_revision

    click.echo(f"{current_revision(Session.of(ctx).engine) or 'empty'} (needed: {HEAD})")


@db.command()
@click.pass_context
def check(ctx: click.Context) -> None:
    """Check revision and pgvector's version; exit 6 if either won't do."""
    from chorus_batch.jobs.database import check_versions

    problems = check_versions(Session.of(ctx).engine)
    if problems:
        raise DependencyDown("; ".join(problems), code="database", hint="`chorus-batch db upgrade`")
    click.echo("ok")


COMMANDS = {"db": db}
