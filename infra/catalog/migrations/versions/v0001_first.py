"""First schema: records, runs, stages, and a promotion ledger that can only grow."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision: str | None = None

SQLITE_GUARDS = (
    "CREATE TRIGGER promotions_no_update BEFORE UPDATE ON promotions"
    " BEGIN SELECT RAISE(ABORT, 'the promotion ledger is append-only'); END",
    "CREATE TRIGGER promotions_no_delete BEFORE DELETE ON promotions"
    " BEGIN SELECT RAISE(ABORT, 'the promotion ledger is append-only'); END",
    # INSERT OR REPLACE deletes without firing the delete trigger.
    "CREATE TRIGGER promotions_no_replace BEFORE INSERT ON promotions"
    " WHEN EXISTS (SELECT 1 FROM promotions WHERE key = NEW.key OR seq = NEW.seq)"
    " BEGIN SELECT RAISE(ABORT, 'the promotion ledger is append-only'); END",
)

POSTGRES_GUARDS = (
    "CREATE FUNCTION promotions_append_only() RETURNS trigger LANGUAGE plpgsql AS"
    " $$ BEGIN RAISE EXCEPTION 'the promotion ledger is append-only'; END $$",
    "CREATE TRIGGER promotions_no_change BEFORE UPDATE OR DELETE OR TRUNCATE ON promotions"
    " FOR EACH STATEMENT EXECUTE FUNCTION promotions_append_only()",
)


def upgrade() -> None:
    """Creates the tables and the guards of the ledger."""
    moment = sa.DateTime(timezone=True)
    op.create_table(
        "records",
        sa.Column("kind", sa.String(100), primary_key=True),
        sa.Column("record_id", sa.String(64), primary_key=True),
        sa.Column("payload", sa.Text, nullable=False),
        sa.Column("created_at", moment, nullable=False),
    )
    op.create_table(
        "runs",
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("run_id", sa.String(40), nullable=False, unique=True),
        sa.Column("domain", sa.String(63), nullable=False, index=True),
        sa.Column("spec_hash", sa.String(64), nullable=False),
        sa.Column("params", sa.JSON, nullable=False),
        sa.Column("status", sa.String(20), nullable=False),
        sa.Column("summary", sa.JSON, nullable=False),
        sa.Column("created_at", moment, nullable=False),
        sa.Column("finished_at", moment, nullable=True),
    )
    op.create_table(
        "stages",
        sa.Column("run_id", sa.String(40), sa.ForeignKey("runs.run_id"), primary_key=True),
        sa.Column("stage", sa.String(60), primary_key=True),
        sa.Column("inputs_hash", sa.String(64), nullable=False),
        sa.Column("output", sa.JSON, nullable=False),
        sa.Column("seconds", sa.Float, nullable=True),
        sa.Column("created_at", moment, nullable=False),
    )
    op.create_table(
        "promotions",
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("key", sa.String(300), nullable=False, unique=True),
        sa.Column("domain", sa.String(63), nullable=False, index=True),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("from_stage", sa.String(20), nullable=False),
        sa.Column("to_stage", sa.String(20), nullable=False),
        sa.Column("who", sa.String(200), nullable=False),
        sa.Column("why", sa.Text, nullable=False),
        sa.Column("gate", sa.JSON, nullable=False),
        sa.Column("created_at", moment, nullable=False),
    )
    guards = SQLITE_GUARDS if op.get_bind().dialect.name == "sqlite" else POSTGRES_GUARDS
    for guard in guards:
        op.execute(guard)


def downgrade() -> None:
    """Refused: going back would drop the ledger."""
    raise RuntimeError("the first catalog schema cannot be undone: it holds the promotion ledger")
