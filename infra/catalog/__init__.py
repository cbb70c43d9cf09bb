"""The catalog: every record, run, stage result and promotion, in SQLite or PostgreSQL."""

from infra.catalog.records import Promotion, RecordRow, RunRow, RunStatus, StageRow
from infra.catalog.store import Catalog

__all__ = ["Catalog", "Promotion", "RecordRow", "RunRow", "RunStatus", "StageRow"]
