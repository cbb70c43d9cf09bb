"""Rows become tasks and demonstrations; rows that cannot are listed, all of them, with what is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data_contracts.config import DemonstrationTable, TaskTable, template_columns
from data_contracts.records import Demonstration, Task
from data_contracts.report import RowFailure, contract_broken, shown
from data_contracts.sources import iterate
from data_contracts.splits import Item, normalise, normalise_value
from data_contracts.transcripts import messages_text, read_messages
from infra.hashing import canonical_json

Tables = Mapping[str, Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class Draft:
    """A task that is not in a split yet, and what decides which one it may go to."""

    task: Task
    item: Item


class _RowError(Exception):
    """What is wrong with one row."""

    def __init__(self, column: str, rule: str, value: Any = None) -> None:
        super().__init__(rule)
        self.column, self.rule, self.value = column, rule, value


class _Failures:
    """Collects the rows of one table that cannot be used, so that all are reported at once."""

    def __init__(self, table: str) -> None:
        self._table = table
        self._failures: list[RowFailure] = []

    def add(self, row: int, error: _RowError) -> None:
        value = None if error.value is None else shown(error.value)
        self._failures.append(RowFailure(table=self._table, row=row, column=error.column, rule=error.rule, value=value))

    def stop_if_any(self, where: str) -> None:
        if self._failures:
            raise contract_broken(tuple(self._failures), len(self._failures), where)


def draft_tasks(config: TaskTable, tables: Tables) -> tuple[list[Draft], dict[str, str]]:
    """All tasks by id, each content once.

    Returns:
        The tasks that are kept, and for every task id in the table the id of the one that is kept for it: of tasks
        that are equal after normalisation (prompt, group and reference) the one with the smallest id.

    Raises:
        CheckFailed: rows without an id, prompt or group, or with an id that another row has.
    """
    failures = _Failures(config.table)
    columns = template_columns(config.prompt)
    drafts: dict[str, Draft] = {}
    for position, row in iterate(tables, config.table):
        try:
            draft = _draft(config, columns, row)
            if draft.task.task_id in drafts:
                raise _RowError(config.id, "two tasks have this id", draft.task.task_id)
        except _RowError as error:
            failures.add(position, error)
            continue
        drafts[draft.task.task_id] = draft
    failures.stop_if_any("data.tasks in domain.yaml")
    first: dict[str, Draft] = {}
    kept_for: dict[str, str] = {}
    for task_id in sorted(drafts):
        draft = drafts[task_id]
        same = canonical_json([draft.item.content, draft.item.group, normalise_value(draft.task.reference)])
        kept_for[task_id] = first.setdefault(same, draft).task.task_id
    return list(first.values()), kept_for


def _draft(config: TaskTable, columns: Sequence[str], row: Mapping[str, Any]) -> Draft:
    task_id = _identity(row, config.id)
    prompt = config.prompt.format_map({name: _text(row, name, "the prompt needs it") for name in columns})
    if not prompt.strip():
        raise _RowError(", ".join(columns), "gives an empty prompt", prompt)
    content = normalise(prompt)
    group = [normalise_value(_present(row, name, "tasks are grouped by it")) for name in config.group]
    key = canonical_json(group) if group else content
    reference = {name: row.get(name) for name in config.reference}
    return Draft(Task(task_id=task_id, prompt=prompt, reference=reference, group_key=key), Item(content, key))


def draft_demonstrations(
    config: DemonstrationTable | None, tables: Tables, kept_for: Mapping[str, str]
) -> list[Demonstration]:
    """All demonstrations in a fixed order, each once, under the id of the task that is kept.

    Raises:
        CheckFailed: rows of unknown tasks, without a source, or with messages that are not well formed.
    """
    if config is None:
        return []
    failures = _Failures(config.table)
    made: dict[tuple[str, str, str], Demonstration] = {}
    for position, row in iterate(tables, config.table):
        try:
            demonstration = _demonstration(config, row, kept_for)
        except _RowError as error:
            failures.add(position, error)
            continue
        made[demonstration.task_id, demonstration.source, messages_text(demonstration.messages)] = demonstration
    failures.stop_if_any("data.demonstrations in domain.yaml")
    return [made[key] for key in sorted(made)]


def _demonstration(config: DemonstrationTable, row: Mapping[str, Any], kept_for: Mapping[str, str]) -> Demonstration:
    task_id = _identity(row, config.task)
    if task_id not in kept_for:
        raise _RowError(config.task, "there is no such task", task_id)
    source = _text(row, config.source, "a demonstration needs it")
    value = _present(row, config.messages, "a demonstration needs it")
    try:
        messages = read_messages(value)
    except ValueError as error:
        raise _RowError(config.messages, str(error), value) from None
    return Demonstration(task_id=kept_for[task_id], source=source, messages=messages)


def _present(row: Mapping[str, Any], column: str, why: str) -> Any:
    value = row.get(column)
    if value is None:
        raise _RowError(column, f"missing; {why}")
    return value


def _text(row: Mapping[str, Any], column: str, why: str) -> str:
    value = _present(row, column, why)
    return value if isinstance(value, str) else canonical_json(value)


def _identity(row: Mapping[str, Any], column: str) -> str:
    value = _present(row, column, "it identifies a task")
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise _RowError(column, "an id is a text or an integer", value)
    return str(value)
