"""cache: what is reused."""

from __future__ import annotations

import click

from chorus_batch.jobs.cli.session import Session, output_options, print_json, print_table


@click.group()
def cache() -> None:
    """Look at the cache."""


@cache.command()
@output_options
@click.pass_context
def stats(ctx: click.Context, as_json: bool, quiet: bool) -> None:
    """Size and use of the cache."""
    from chorus_batch.jobs import statistics
    from chorus_batch.jobs.database import transaction

    with transaction(Session.of(ctx).database) as connection:
        sums = statistics.cache_totals(connection)
    if as_json:
        print_json(sums)
    elif quiet:
        click.echo(sums["entries"])
    else:
        print_table([{"what": name, "value": value} for name, value in sums.items()], {"what": "CACHE", "value": ""})


@cache.command("ls")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="How many entries.")
@output_options
@click.pass_context
def ls(ctx: click.Context, limit: int, as_json: bool, quiet: bool) -> None:
    """The entries that saved most."""
    from chorus_batch.jobs import statistics
    from chorus_batch.jobs.database import transaction

    with transaction(Session.of(ctx).database) as connection:
        rows = statistics.entries(connection, limit)
    if as_json:
        for row in rows:
            print_json(row)
    elif quiet:
        for row in rows:
            click.echo(row["entry_id"])
    else:
        titles = {"entry_id": "ENTRY", "hits": "HITS", "steps_skipped": "STEPS SKIPPED", "bytes": "BYTES"}
        print_table(rows, {**titles, "model": "MODEL", "prompt": "PROMPT"})


COMMANDS = {"cache": cache}
