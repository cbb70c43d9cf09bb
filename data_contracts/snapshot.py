"""Snapshots: validated tasks and demonstrations frozen as Parquet files with sha256 hashes, split without leakage."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from data_contracts.config import DataConfig
from data_contracts.contract import DataContract
from data_contracts.drafts import Draft, Tables, draft_demonstrations, draft_tasks
from data_contracts.records import Demonstration, Snapshot, SnapshotFile, Task
from data_contracts.report import ValidationReport
from data_contracts.splits import SPLITS, Split, assign
from data_contracts.strict_json import parse_json
from data_contracts.transcripts import messages_text, parse_messages
from infra.errors import CheckFailed, UsageError
from infra.hashing import canonical_json, content_hash, file_hash

MANIFEST = "manifest.json"
DEMONSTRATIONS = "demonstrations"
Columns = dict[str, list[str]]


def build_snapshot(
    domain: str,
    contract: DataContract,
    config: DataConfig,
    tables: Tables,
    report: ValidationReport,
    folder: Path,
) -> Snapshot:
    """Freeze validated rows in ``folder``, which appears whole or not at all.

    The same rows in any order give the same snapshot, byte for byte. Tasks that are equal after normalisation (prompt,
    group and reference) are kept once. Demonstrations of test tasks are left out.

    Args:
        domain: the domain's name.
        contract: the contract that ``tables`` satisfy.
        config: which columns make tasks and demonstrations; sizes of the splits.
        tables: rows per table.
        report: the verdict on ``tables``.
        folder: does not exist yet, is empty, or holds this same snapshot.

    Returns:
        The record that is also in ``folder/manifest.json``.

    Raises:
        UsageError: ``config`` names a table or column that the contract does not have.
        CheckFailed: ``report`` is not good or about other data, a row makes no task or demonstration, there are too
            few tasks for the splits, or ``folder`` holds something else.
    """
    config.check(contract)
    report.raise_on_failure()
    if report.contract_hash != contract.content_hash or report.rows != {
        name: len(tables[name]) for name in report.rows
    }:
        raise CheckFailed("the validation report is about other data", where=domain, fix="validate these tables first")
    drafts, kept_for = draft_tasks(config.tasks, tables)
    split_of = _split(drafts, config)
    demonstrations = draft_demonstrations(config.demonstrations, tables, kept_for)
    kept = [made for made in demonstrations if split_of[made.task_id] != "test"]
    contents: dict[str, Columns] = {
        split: _task_columns(draft.task for draft in drafts if split_of[draft.task.task_id] == split)
        for split in SPLITS
    }
    contents[DEMONSTRATIONS] = _demonstration_columns(kept, split_of)
    lineage = {
        "contract": {key: contract.values.get(key) for key in ("id", "version")},
        "config_hash": content_hash(config.model_dump(mode="json")),
        "sources": {name: table.server for name, table in contract.tables.items()},
        "asked": {"dev": config.splits.dev, "test": config.splits.test},
        "collapsed_duplicates": len(kept_for) - len(drafts),
        "demonstrations_of_test_tasks_left_out": len(demonstrations) - len(kept),
    }
    validation = report.model_dump(mode="json", exclude={"contract_hash", "failures", "failure_count"})
    return _write(folder, contents, {"domain": domain, "contract_hash": contract.content_hash}, validation, lineage)


def _split(drafts: Sequence[Draft], config: DataConfig) -> dict[str, Split]:
    """Task id → split.

    Raises:
        CheckFailed: too few tasks, or groups so large that a split stays empty.
    """
    asked = config.splits
    where = "data.splits in domain.yaml"
    if len(drafts) <= asked.dev + asked.test:
        raise CheckFailed(
            f"{len(drafts):,} different tasks are too few for {asked.dev:,} dev and {asked.test:,} test tasks",
            where=where,
            fix="bring more data, or ask for smaller splits",
        )
    splits = assign([draft.item for draft in drafts], asked.dev, asked.test, asked.salt)
    counts = Counter(splits)
    for split in SPLITS:
        if not counts[split]:
            raise CheckFailed(
                f"the groups of tasks are too large: no task is left for {split}",
                where=where,
                fix="group by columns that vary more (data.tasks.group), or ask for other sizes",
            )
    return {draft.task.task_id: split for draft, split in zip(drafts, splits, strict=True)}


def _task_columns(tasks: Iterable[Task]) -> Columns:
    columns: Columns = {"task_id": [], "prompt": [], "reference": [], "group_key": []}
    for task in tasks:
        columns["task_id"].append(task.task_id)
        columns["prompt"].append(task.prompt)
        columns["reference"].append(canonical_json(task.reference))
        columns["group_key"].append(task.group_key)
    return columns


def _demonstration_columns(demonstrations: Iterable[Demonstration], split_of: Mapping[str, Split]) -> Columns:
    """Messages are kept as JSON text: Arrow structs would fill absent keys with nulls."""
    columns: Columns = {"task_id": [], "split": [], "source": [], "messages": []}
    for made in demonstrations:
        columns["task_id"].append(made.task_id)
        columns["split"].append(split_of[made.task_id])
        columns["source"].append(made.source)
        columns["messages"].append(messages_text(made.messages))
    return columns


def _write(
    folder: Path,
    contents: Mapping[str, Columns],
    names: Mapping[str, str],
    validation: dict[str, Any],
    lineage: dict[str, Any],
) -> Snapshot:
    """Write beside ``folder`` and rename, so that nobody ever sees half a snapshot."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{uuid4().hex}.partial")
    partial.mkdir()
    try:
        files = {}
        for name, columns in contents.items():
            path = partial / f"{name}.parquet"
            schema = pa.schema([(column, pa.string()) for column in columns])
            pq.write_table(pa.table(columns, schema=schema), path, compression="zstd")
            rows = len(next(iter(columns.values())))
            files[name] = SnapshotFile(path=path.name, sha256=file_hash(path), rows=rows)
        snapshot = Snapshot(**names, files=files, validation=validation, lineage=lineage)
        (partial / MANIFEST).write_text(snapshot.model_dump_json(indent=2) + "\n", encoding="utf-8")
        try:
            partial.rename(folder)
        except OSError as error:
            if not folder.is_dir() or read_manifest(folder) != snapshot:
                fix = "name a folder that does not exist yet"
                raise CheckFailed("the folder holds something else", where=str(folder), fix=fix) from error
            for name in files:
                _verified(folder, snapshot, name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return snapshot


def read_manifest(folder: Path) -> Snapshot | None:
    """The snapshot that a folder says it holds; ``None`` if it has no readable manifest."""
    try:
        return Snapshot.model_validate_json((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # pydantic's ValidationError is a ValueError
        return None


def load_tasks(folder: Path, snapshot: Snapshot, split: str) -> list[Task]:
    """The tasks of one split (``train``, ``dev`` or ``test``), by id.

    Raises:
        UsageError: there is no such split.
        CheckFailed: the file is missing or is not the one that was written.
    """
    rows = _rows(folder, snapshot, _known(split))
    return [
        Task(
            task_id=row["task_id"],
            prompt=row["prompt"],
            reference=parse_json(row["reference"]),
            group_key=row["group_key"],
        )
        for row in rows
    ]


def load_demonstrations(folder: Path, snapshot: Snapshot, split: str) -> list[Demonstration]:
    """The demonstrations of the tasks of one split, exactly as they were made; none for ``test``.

    Raises:
        UsageError: there is no such split.
        CheckFailed: the file is missing or is not the one that was written.
    """
    wanted = _known(split)
    return [
        Demonstration(task_id=row["task_id"], source=row["source"], messages=parse_messages(row["messages"]))
        for row in _rows(folder, snapshot, DEMONSTRATIONS)
        if row["split"] == wanted
    ]


def _known(split: str) -> str:
    if split not in SPLITS:
        raise UsageError(f"there is no split {split!r}", where="snapshot", fix=f"use one of {', '.join(SPLITS)}")
    return split


def _rows(folder: Path, snapshot: Snapshot, name: str) -> list[dict[str, str]]:
    import pyarrow.parquet as pq

    rows: list[dict[str, str]] = pq.read_table(_verified(folder, snapshot, name)).to_pylist()
    return rows


def _verified(folder: Path, snapshot: Snapshot, name: str) -> Path:
    file = snapshot.files[name]
    path = folder / file.path
    if not path.is_file() or file_hash(path) != file.sha256:
        state = "is not the one that was written" if path.is_file() else "is missing"
        raise CheckFailed(
            f"the snapshot's file {file.path} {state}",
            where=str(path),
            fix="restore it from a backup, or make a new snapshot with `senmon run`",
        )
    return path
