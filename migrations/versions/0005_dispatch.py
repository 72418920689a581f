"""Dispatch: how long a job has been ready, so that nobody waits for ever behind what workers hold."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    since = sa.Column("ready_since", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False)
    op.add_column("queue", since)


def downgrade() -> None:
    op.drop_column("queue", "ready_since")
