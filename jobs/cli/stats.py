"""stats and sql: what the views say."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from chorus_batch.jobs.cli.session import SCHEMA_VERSION, Session, output_options, plain, print_json, print_table


@click.command()
@click.argument("batch", required=False)
@output_options
@click.pass_context
def stats(ctx: click.Context, batch: str | None, as_json: bool, quiet: bool) -> None:
    """Sums over hits, skipped steps and seconds: of one batch, or of everything.

    The figures are those of the view cache_hits_by_batch.
    """
    from chorus_batch.jobs import statistics
    from chorus_batch.jobs.database import transaction

    with transaction(Session.of(ctx).database) as connection:
        batch_id = statistics.find_batch(connection, batch) if batch else None
        sums = statistics.totals(connection, batch_id)
        phases = statistics.seconds_by_phase(connection, batch_id)
    if as_json:
        print_json({**sums, "seconds_by_phase": phases})
        return
    if quiet:
        click.echo(f"{sums['hit_rate'] or 0:.4f}")
        return
    print_table([{"what": name, "value": value} for name, value in sums.items()], {"what": "STATISTIC", "value": ""})
    click.echo()
    rows = [{"phase": name, "seconds": spent} for name, spent in phases.items()]
    print_table(rows, {"phase": "PHASE", "seconds": "SECONDS"})


@click.command()
@click.argument("query")
@click.option("--format", "shape", type=click.Choice(["table", "csv", "json"]), default="table", show_default=True)
@click.pass_context
def sql(ctx: click.Context, query: str, shape: str) -> None:
    """Run a query of your own with a role that may only read; `-` reads it from standard input.

    Views made for it: cache_hits_by_batch, cache_hits_by_day, hit_rate_per_100, savings_by_entry.
    """
    from chorus_batch.jobs.database import transaction
    from chorus_batch.jobs.statistics import read_only_query

    query = sys.stdin.read() if query == "-" else query
    with transaction(Session.of(ctx).database) as connection:
        columns, rows = read_only_query(connection, query)
    if shape == "json":
        for row in rows:
            click.echo(
                json.dumps(dict(zip(columns, row, strict=True)) | {"schema_version": SCHEMA_VERSION}, default=plain)
            )
    elif shape == "csv":
        _print_csv(columns, rows)
    else:
        named = {str(n): column for n, column in enumerate(columns)}
        print_table(({str(n): value for n, value in enumerate(row)} for row in rows), named)


def _print_csv(columns: list[str], rows: list[tuple[Any, ...]]) -> None:
    import csv

    from chorus_batch.jobs.spreadsheet import safe_cell

    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([safe_cell(column) for column in columns])
    for row in rows:
        writer.writerow([safe_cell(_in_csv(value)) for value in row])


def _in_csv(value: Any) -> Any:
    """JSON as JSON and bytes in hexadecimal, not as Python writes them."""
    if isinstance(value, dict | list | bool):
        return json.dumps(value, default=plain, ensure_ascii=False)
    return plain(value) if isinstance(value, bytes | memoryview) else value


COMMANDS = {"stats": stats, "sql": sql}
