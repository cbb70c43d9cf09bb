"""Base of all records: immutable, JSON-serialisable, identified by the hash of their content."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from infra.hashing import content_hash


class Record(BaseModel):
    """An immutable record; equal content means equal :attr:`id`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    @property
    def id(self) -> str:
        """Content hash over all fields (sha256, hex)."""
        return content_hash(self.payload())

    def payload(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        return self.model_dump(mode="json")


class Config(BaseModel):
    """Base of every user-written configuration section: unknown keys, NaN and infinities are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
