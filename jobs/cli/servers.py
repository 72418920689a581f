"""up, down, ps: the local profile's servers."""

from __future__ import annotations

from dataclasses import asdict

import click

from chorus_batch.jobs.cli.session import Session, output_options, print_json, print_table


@click.command()
@click.pass_context
def up(ctx: click.Context) -> None:
    """Start the local profile's servers and bring the schema up to date."""
    session = Session.of(ctx)
    session.database.dispose()
    click.echo(f"up: data in {session.settings.data_dir}", err=True)


@click.command()
@click.pass_context
def down(ctx: click.Context) -> None:
    """Stop the local profile's servers. Data stays; the next command starts them again."""
    from chorus_batch.jobs.local.profile import down as stop

    stop(Session.of(ctx).asked)


@click.command()
@output_options
@click.pass_context
def ps(ctx: click.Context, as_json: bool, quiet: bool) -> None:
    """Show the local profile's servers, without starting any."""
    from chorus_batch.jobs.local.profile import ps as statuses

    rows = [asdict(status) for status in statuses(Session.of(ctx).asked)]
    if as_json:
        for row in rows:
            print_json(row)
    elif quiet:
        for row in rows:
            click.echo(row["name"])
    else:
        titles = {"name": "SERVER", "running": "RUNNING", "pid": "PID", "version": "VERSION", "address": "ADDRESS"}
        print_table(rows, {**titles, "log_path": "LOG"})


COMMANDS = {"up": up, "down": down, "ps": ps}
