"""A role that may only read, for `chorus-batch sql`."""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Roles belong to the whole server: another database may have made it. A managed database may forbid making roles;
    # then `sql` still runs in a read-only transaction.
    op.execute(
        """
        DO $$ BEGIN
            CREATE ROLE chorus_reader NOLOGIN;
        EXCEPTION
            WHEN duplicate_object OR unique_violation THEN NULL;
            WHEN insufficient_privilege THEN RAISE WARNING 'chorus_reader can''t be made: %', SQLERRM;
        END $$
        """
    )
    op.execute(
        """
        DO $$ BEGIN
            GRANT chorus_reader TO CURRENT_USER;
            GRANT USAGE ON SCHEMA public TO chorus_reader;
            GRANT SELECT ON ALL TABLES IN SCHEMA public TO chorus_reader;
            ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT SELECT ON TABLES TO chorus_reader;
        EXCEPTION
            WHEN undefined_object OR insufficient_privilege THEN RAISE WARNING 'chorus_reader has no rights: %', SQLERRM;
        END $$
        """
    )


def downgrade() -> None:
    op.execute(
        """
        DO $$ BEGIN
            ALTER DEFAULT PRIVILEGES IN SCHEMA public REVOKE SELECT ON TABLES FROM chorus_reader;
            REVOKE SELECT ON ALL TABLES IN SCHEMA public FROM chorus_reader;
            REVOKE USAGE ON SCHEMA public FROM chorus_reader;
        EXCEPTION
            WHEN undefined_object OR insufficient_privilege THEN NULL;
        END $$
        """
    )
    # The role itself stays: other databases of the server may use it.
