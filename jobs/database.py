"""Connections to Postgres, and the schema's migrations."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path

import psycopg
import sqlalchemy
from sqlalchemy import Connection, Dialect, Engine, event, text
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import InvalidatePoolError
from sqlalchemy.pool import ConnectionPoolEntry, PoolProxiedConnection

from chorus_batch.jobs.errors import DependencyDown, SettingsError

# The oldest pgvector without the index corruption of 0.8.2 and the insert errors of 0.8.3 (its change log).
OLDEST_PGVECTOR = (0, 8, 4)
# The newest revision in migrations/versions, by name: asking alembic takes a second at the start of every command.
HEAD = "0006"
# After so many seconds of rest a connection is tested for a single statement too.
TESTED_AFTER = 1.0
_SINGLE = ContextVar("single", default=False)


def driver_url(url: str) -> sqlalchemy.URL:
    """The SQLAlchemy form (psycopg 3) of an ordinary `postgresql://` URL. Raises SettingsError for another one."""
    try:
        parsed = sqlalchemy.make_url(url)
    except (sqlalchemy.exc.ArgumentError, ValueError):
        parsed = None
    if parsed is None or parsed.get_backend_name() not in ("postgresql", "postgres"):
        # Not shown: it holds a password.
        raise SettingsError(
            "database_url is not a postgresql:// URL",
            hint="set CHORUS_DATABASE_URL to postgresql://user:password@host:5432/name",
        )
    return parsed.set(drivername="postgresql+psycopg")


def connect(url: str, *, pool_size: int = 5, plan_once: bool = False) -> Engine:
    """An engine whose connections are tested before use: a restarted server costs a reconnect, not a job.

    `plan_once` is for workers, which run few statements and run them often: each is planned once for a connection.
    """
    # A stuck client must not hold back vacuum: a queue suffers first.
    options = ["-c idle_in_transaction_session_timeout=60000"]
    if plan_once:
        options.append("-c plan_cache_mode=force_generic_plan")
    engine = sqlalchemy.create_engine(
        driver_url(url),
        pool_size=pool_size,
        connect_args={
            "application_name": "chorus-batch",
            "connect_timeout": 10,
            "options": " ".join(options),
        },
    )
    event.listen(engine, "checkin", _note_use)
    event.listen(engine, "checkout", partial(_test, engine.dialect))
    return engine


def _note_use(driver: DBAPIConnection | None, record: ConnectionPoolEntry) -> None:
    record.info["used"] = time.monotonic()


def _test(dialect: Dialect, driver: DBAPIConnection, record: ConnectionPoolEntry, proxy: PoolProxiedConnection) -> None:
    # The pool's own pre-ping would test for a single statement too, which is a fifth of a claim.
    used: float | None = record.info.get("used")
    if used is None or (_SINGLE.get() and time.monotonic() - used < TESTED_AFTER):
        return  # new, or trusted
    try:
        dialect.do_ping(driver)
    except psycopg.OperationalError as error:
        raise InvalidatePoolError from error  # the pool connects anew, here and for the others


@contextmanager
def transaction(engine: Engine) -> Iterator[Connection]:
    """One transaction; a server that is away becomes DependencyDown."""
    with _named(), engine.begin() as connection:
        yield connection


@contextmanager
def statement(engine: Engine) -> Iterator[Connection]:
    """A connection for one statement, which is its own transaction: three round trips fewer than `transaction`.

    One that was used within the last second isn't tested: if it ended since, that is a DependencyDown, so this is for
    what is simply asked again.
    """
    with _named():
        single = _SINGLE.set(True)
        try:
            connection = engine.connect()
        finally:
            _SINGLE.reset(single)
        with connection:
            yield connection.execution_options(isolation_level="AUTOCOMMIT")


@contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except (sqlalchemy.exc.OperationalError, psycopg.OperationalError) as error:
        # The driver's own where code talks to it directly: COPY, vectors.
        said = error.orig if isinstance(error, sqlalchemy.exc.OperationalError) else error
        raise DependencyDown(
            f"database: {str(said).strip()}", code="database", hint="run `chorus-batch doctor`"
        ) from error


def upgrade(engine: Engine, revision: str = "head") -> None:
    """Bring the schema to `revision`; several commands may call this at once."""
    from alembic import command

    with transaction(engine) as connection:
        # Two first commands at once: the second waits here and then finds nothing to do.
        connection.execute(text("SELECT pg_advisory_xact_lock(hashtext('chorus-batch migrations'))"))
        command.upgrade(_alembic_config(connection), revision)


def downgrade(engine: Engine, revision: str) -> None:
    """Take the schema back to `revision` (`base`: nothing is left)."""
    from alembic import command

    with transaction(engine) as connection:
        command.downgrade(_alembic_config(connection), revision)


def current_revision(engine: Engine) -> str | None:
    """The revision that the database is at, None for an empty one."""
    with transaction(engine) as connection:
        if connection.execute(text("SELECT to_regclass('alembic_version')")).scalar() is None:
            return None
        return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


def ensure_schema(engine: Engine) -> None:
    """Upgrade if the database isn't at the revision that this program needs."""
    if current_revision(engine) != HEAD:
        upgrade(engine)


def _migrations() -> Path:
    # Found by its file, not imported: alembic runs the scripts itself.
    return Path(__file__).resolve().parent.parent / "migrations"


def _alembic_config(connection: Connection):  # type: ignore[no-untyped-def]
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_migrations()))
    config.attributes["connection"] = connection
    return config


def check_versions(engine: Engine) -> list[str]:
    """What is wrong with the schema's revision or with pgvector; empty if nothing is."""
    problems = []
    revision = current_revision(engine)
    if revision != HEAD:
        problems.append(f"the schema is at revision {revision or 'none'}, this program needs {HEAD}")
    with transaction(engine) as connection:
        query = "SELECT coalesce((SELECT extversion FROM pg_extension WHERE extname = 'vector'), '')"
        version = str(connection.execute(text(query)).scalar_one())
    found = tuple(int(part) for part in version.split(".") if part.isdecimal())
    if found < OLDEST_PGVECTOR:
        needed = ".".join(map(str, OLDEST_PGVECTOR))
        problems.append(f"pgvector is {version or 'missing'}, {needed} or newer is needed (older ones corrupt indexes)")
    return problems
