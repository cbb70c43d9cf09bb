"""What the catalog hands out: rows of runs and stages, and the promotion ledger's entries."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import AwareDatetime, Field

from infra.records import Record

RunStatus = Literal["running", "failed", "interrupted", "partial", "rejected", "succeeded"]
"""``running``, ``failed``, ``interrupted`` and ``partial`` (only some stages were asked for) can be resumed;
``rejected`` (a gate said no) and ``succeeded`` are final."""

UNFINISHED: tuple[RunStatus, ...] = ("running", "failed", "interrupted", "partial")


def utc_now() -> datetime:
    """The current time, with its zone."""
    return datetime.now(UTC)


class RecordRow(Record):
    """One stored record: its content hash, its kind, and its content as JSON values."""

    record_id: str
    kind: str
    content: dict[str, Any]
    created_at: AwareDatetime


class RunRow(Record):
    """One run of a domain's pipeline."""

    run_id: str
    domain: str
    spec_hash: str
    params: dict[str, Any]
    status: RunStatus
    summary: dict[str, Any]
    created_at: AwareDatetime
    finished_at: AwareDatetime | None

    @property
    def unfinished(self) -> bool:
        """Whether the run can be resumed."""
        return self.status in UNFINISHED


class StageRow(Record):
    """The result of one finished stage of a run; ``inputs_hash`` says from what it was made."""

    run_id: str
    stage: str
    inputs_hash: str
    output: dict[str, Any]
    seconds: float | None
    created_at: AwareDatetime


class Promotion(Record):
    """One entry of the append-only ledger: which version moved where, by whom, why, and what the gate said.

    ``key`` makes appending idempotent: a retried flow appends one entry.
    """

    key: str = Field(min_length=1, max_length=300)
    domain: str
    version: int = Field(ge=1)
    from_stage: str
    to_stage: str
    who: str
    why: str
    gate: dict[str, Any] = Field(default_factory=dict)
    created_at: AwareDatetime = Field(default_factory=utc_now)
