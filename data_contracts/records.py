"""Records made from a domain's data."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from infra.inference.messages import Message
from infra.records import Record


class Task(Record):
    """One piece of work for the agent: what it is told, and the hidden reference it is judged by.

    ``group_key`` says which tasks must stay in the same split (same supplier, same line items, …).
    """

    task_id: str
    prompt: str
    reference: dict[str, Any]
    group_key: str


class Demonstration(Record):
    """A worked example: the messages after the prompt, by whom (``source``), for which task."""

    task_id: str
    source: str
    messages: tuple[Message, ...]


class SnapshotFile(Record):
    """One Parquet file of a snapshot; ``path`` is relative to the snapshot's folder."""

    path: str
    sha256: str
    rows: int


class Snapshot(Record):
    """Validated data, frozen: Parquet files and their hashes, what was checked, where it came from."""

    domain: str
    contract_hash: str
    files: dict[str, SnapshotFile]
    """``train``, ``dev``, ``test`` (tasks) and ``demonstrations``."""
    validation: dict[str, Any] = Field(default_factory=dict)
    lineage: dict[str, Any] = Field(default_factory=dict)
