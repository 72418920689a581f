"""Runs migrations on the connection it is handed, or on the one that the settings name."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection
from sqlalchemy.schema import SchemaItem

from chorus_batch.jobs.models import Model


def _in_models(item: SchemaItem, name: str | None, kind: str, reflected: bool, compare_to: SchemaItem | None) -> bool:
    """The approximate index of each embedding space is made when the space is, so no model lists it."""
    return not (kind == "index" and reflected and (name or "").startswith("ix_cache_entries_space_"))


def _run(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=Model.metadata, include_object=_in_models)
    with context.begin_transaction():
        context.run_migrations()


handed = context.config.attributes.get("connection")
if handed is not None:
    _run(handed)
else:
    # `alembic` called by hand, not through `chorus-batch db`.
    from chorus_batch.jobs.database import connect
    from chorus_batch.jobs.local.profile import ensure
    from chorus_batch.jobs.settings import load_settings

    with connect(ensure(load_settings()).database_url).begin() as connection:
        _run(connection)
