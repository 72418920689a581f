"""Connections: tested before use, or after a rest, and lost ones replaced."""

from __future__ import annotations

from unittest.mock import patch

import psycopg
import pytest
from sqlalchemy import Engine, text

from chorus_batch.jobs.database import statement, transaction
from chorus_batch.jobs.errors import DependencyDown


def end_connections(engine: Engine) -> None:
    """As a restart of the server does it. From another database: this connection must not be among them."""
    url = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url, dbname="postgres", autocommit=True) as connection:
        query = "SELECT count(pg_terminate_backend(pid, 5000)) FROM pg_stat_activity WHERE datname = %s"
        assert connection.execute(query, [engine.url.database]).fetchone() == (engine.pool.checkedin(),)


def ask(engine: Engine) -> int:
    with statement(engine) as connection:
        return int(connection.execute(text("SELECT pg_backend_pid()")).scalar_one())


def ask_many(engine: Engine, connections: int) -> None:
    """Leave `connections` of them in the pool."""
    if connections:
        with statement(engine):
            ask_many(engine, connections - 1)


def test_connections_that_ended_in_a_rest_cost_nothing(database: Engine) -> None:
    ask_many(database, 3)
    first = ask(database)
    with patch("chorus_batch.jobs.database.TESTED_AFTER", 0.0):
        end_connections(database)
        assert ask(database) != first


def test_one_that_ended_in_use_is_named_and_takes_its_neighbours_along(database: Engine) -> None:
    ask_many(database, 3)
    with patch("chorus_batch.jobs.database.TESTED_AFTER", 3600.0):
        end_connections(database)
        with pytest.raises(DependencyDown, match="database: "):
            ask(database)
        assert ask(database) > 0
        ask_many(database, 3)  # none of the others that ended is left


def test_a_transaction_never_meets_one_that_ended(database: Engine) -> None:
    ask_many(database, 3)
    end_connections(database)
    with transaction(database) as connection:
        assert connection.execute(text("SELECT 1")).scalar_one() == 1


def test_for_one_statement_only_a_rested_connection_is_tested(database: Engine) -> None:
    with patch.object(database.dialect, "do_ping", wraps=database.dialect.do_ping) as ping:
        with patch("chorus_batch.jobs.database.TESTED_AFTER", 3600.0):
            ask(database)
            ask(database)
        assert ping.call_count == 0
        with patch("chorus_batch.jobs.database.TESTED_AFTER", 0.0):
            ask(database)
        assert ping.call_count == 1
