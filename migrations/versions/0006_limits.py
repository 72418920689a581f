"""Limits of a batch: so many hours of workers, until such a time; and which of them stopped it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("batches", sa.Column("max_seconds", sa.Double(), nullable=True))
    op.add_column("batches", sa.Column("deadline", sa.DateTime(timezone=True), nullable=True))
    op.add_column("batches", sa.Column("stopped", sa.Text(), nullable=True))
    op.add_column("batches", sa.Column("checked_until", sa.DateTime(timezone=True), nullable=True))
    op.create_check_constraint(op.f("ck_batches_budget_not_negative"), "batches", "max_seconds >= 0")
    op.create_check_constraint(
        op.f("ck_batches_stopped_by_a_limit"),
        "batches",
        "stopped IS NULL OR (stopped IN ('budget', 'deadline') AND state = 'paused')",
    )
    op.create_index(
        "ix_batches_limited",
        "batches",
        ["id"],
        postgresql_where=sa.text("state = 'active' AND (max_seconds IS NOT NULL OR deadline IS NOT NULL)"),
    )


def downgrade() -> None:
    op.drop_index("ix_batches_limited", "batches")
    op.drop_constraint(op.f("ck_batches_stopped_by_a_limit"), "batches")
    op.drop_constraint(op.f("ck_batches_budget_not_negative"), "batches")
    for column in ("max_seconds", "deadline", "stopped", "checked_until"):
        op.drop_column("batches", column)
