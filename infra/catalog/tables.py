"""The catalog's tables as the code sees them; the migrations build them, a test compares the two."""

from __future__ import annotations

from datetime import UTC, datetime

import sqlalchemy as sa
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator

METADATA = sa.MetaData()


class UtcDateTime(TypeDecorator[datetime]):
    """A time with its zone in and out; SQLite, which has no zones, keeps it in UTC."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """To UTC; a time without a zone is taken as local."""
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """In UTC."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


RECORDS = sa.Table(
    "records",
    METADATA,
    sa.Column("kind", sa.String(100), primary_key=True),
    sa.Column("record_id", sa.String(64), primary_key=True),
    # Text, not JSON: the stored bytes are what the content hash was taken of, and reading checks it.
    sa.Column("payload", sa.Text, nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
)

RUNS = sa.Table(
    "runs",
    METADATA,
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("run_id", sa.String(40), nullable=False, unique=True),
    sa.Column("domain", sa.String(63), nullable=False, index=True),
    sa.Column("spec_hash", sa.String(64), nullable=False),
    sa.Column("params", sa.JSON, nullable=False),
    sa.Column("status", sa.String(20), nullable=False),
    sa.Column("summary", sa.JSON, nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("finished_at", UtcDateTime, nullable=True),
)

STAGES = sa.Table(
    "stages",
    METADATA,
    sa.Column("run_id", sa.String(40), sa.ForeignKey("runs.run_id"), primary_key=True),
    sa.Column("stage", sa.String(60), primary_key=True),
    sa.Column("inputs_hash", sa.String(64), nullable=False),
    sa.Column("output", sa.JSON, nullable=False),
    sa.Column("seconds", sa.Float, nullable=True),
    sa.Column("created_at", UtcDateTime, nullable=False),
)

PROMOTIONS = sa.Table(
    "promotions",
    METADATA,
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("key", sa.String(300), nullable=False, unique=True),
    sa.Column("domain", sa.String(63), nullable=False, index=True),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("from_stage", sa.String(20), nullable=False),
    sa.Column("to_stage", sa.String(20), nullable=False),
    sa.Column("who", sa.String(200), nullable=False),
    sa.Column("why", sa.Text, nullable=False),
    sa.Column("gate", sa.JSON, nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
)
