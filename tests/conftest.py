"""Real servers for the tests that need them: started once, in a folder of their own, removed at the end."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import make_url

from chorus_batch.jobs.database import connect, upgrade
from chorus_batch.jobs.local import profile as local
from chorus_batch.jobs.settings import Settings


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own CHORUS_* variables must not change what the tests see."""
    for name in list(os.environ):
        if name.startswith("CHORUS_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def servers() -> Iterator[Settings]:
    """Settings of the local profile with live addresses."""
    # Not tmp_path: as root the servers run as another user, who may not enter pytest's folders.
    folder = Path(tempfile.mkdtemp(prefix="chorus-test-", dir="/tmp"))
    folder.chmod(0o711)
    settings = Settings(data_dir=folder)
    try:
        yield local.ensure(settings)
    finally:
        local.down(settings)
        shutil.rmtree(folder)


@pytest.fixture
def database_url(servers: Settings) -> Iterator[str]:
    """The URL of a fresh, empty database."""
    with _new_database(servers, "template0") as url:
        yield url


@contextmanager
def _new_database(servers: Settings, template: str) -> Iterator[str]:
    name = f"test_{secrets.token_hex(6)}"
    copy = sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), sql.Identifier(template))
    with psycopg.connect(servers.database_url, autocommit=True) as connection:
        connection.execute(copy)
    yield make_url(servers.database_url).set(database=name).render_as_string(hide_password=False)
    with psycopg.connect(servers.database_url, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture(scope="session")
def _migrated_template(servers: Settings) -> str:
    """The name of a database at the newest schema, to be copied: migrating takes a second, copying a tenth."""
    name = "test_template"
    with psycopg.connect(servers.database_url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    engine = connect(make_url(servers.database_url).set(database=name).render_as_string(hide_password=False))
    upgrade(engine)
    engine.dispose()
    return name


@pytest.fixture
def migrated_url(servers: Settings, _migrated_template: str) -> Iterator[str]:
    """The URL of a fresh database at the newest schema."""
    with _new_database(servers, _migrated_template) as url:
        yield url


@pytest.fixture
def store_settings(servers: Settings) -> Settings:
    """Settings whose bucket no other test uses; it doesn't exist yet."""
    return replace(servers, s3_bucket=f"test-{secrets.token_hex(6)}")
