"""The ``data`` section of a domain: which columns become tasks and demonstrations, and how they are split."""

from __future__ import annotations

from string import Formatter
from typing import Any

from pydantic import Field, field_validator

from data_contracts.contract import DataContract, Table
from infra.errors import UsageError
from infra.records import Config
from infra.yaml_file import did_you_mean


def template_columns(template: str) -> tuple[str, ...]:
    """Columns named in a prompt template, in order.

    Raises:
        ValueError: a field is not a plain column name (``{a.b}``, ``{a[0]}``, ``{a!r}``, ``{a:>9}``, ``{}``).
    """
    columns = []
    for _, name, form, conversion in Formatter().parse(template):
        if name is None:
            continue
        if not name.isidentifier() or form or conversion:
            shown = name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
            raise ValueError(f"{{{shown}}} is not a plain column name; write {{column}}, and {{{{ or }}}} for a brace")
        columns.append(name)
    return tuple(columns)


class TaskTable(Config):
    """How rows of a table become tasks."""

    table: str
    id: str
    """Column that identifies a task."""
    prompt: str = Field(min_length=1)
    """What the agent is told; ``{column}`` is replaced by the row's value."""
    reference: list[str] = Field(default_factory=list)
    """Columns that only environment and verifiers see."""
    group: list[str] = Field(default_factory=list)
    """Tasks equal in these columns stay in the same split; none = tasks with equal prompts."""

    @field_validator("prompt")
    @classmethod
    def _plain(cls, prompt: str) -> str:
        template_columns(prompt)
        return prompt


class DemonstrationTable(Config):
    """How rows of a table become demonstrations."""

    table: str
    task: str
    """Column with the task's id."""
    source: str
    """Column that says who or what made it."""
    messages: str
    """Column with the messages after the prompt: a JSON list."""


class Splits(Config):
    """How many tasks are held out; the rest is for training."""

    dev: int = Field(ge=1)
    test: int = Field(ge=1)
    salt: str = ""
    """Change it to draw other splits."""


class DataConfig(Config):
    """The ``data`` section of ``domain.yaml``."""

    tasks: TaskTable
    demonstrations: DemonstrationTable | None = None
    splits: Splits

    def check(self, contract: DataContract) -> None:
        """Make sure that every table and column named here is in the contract.

        Raises:
            UsageError: one is not; says which, and the nearest name.
        """
        table = _table(contract, self.tasks.table, "data.tasks.table")
        columns: dict[str, Any] = {"id": [self.tasks.id], "prompt": template_columns(self.tasks.prompt)}
        columns |= {"reference": self.tasks.reference, "group": self.tasks.group}
        _columns(contract, table, "data.tasks", columns)
        if self.demonstrations is not None:
            made = self.demonstrations
            table = _table(contract, made.table, "data.demonstrations.table")
            columns = {"task": [made.task], "source": [made.source], "messages": [made.messages]}
            _columns(contract, table, "data.demonstrations", columns)


def _table(contract: DataContract, name: str, key: str) -> Table:
    if name not in contract.tables:
        raise UsageError(
            f"{key}: the contract has no table {name!r}{did_you_mean(name, contract.tables)}",
            where=str(contract.path),
            fix=f"tables of the contract: {', '.join(contract.tables)}",
        )
    return contract.tables[name]


def _columns(contract: DataContract, table: Table, key: str, wanted: dict[str, Any]) -> None:
    for field, names in wanted.items():
        for name in names:
            if name not in table.columns:
                raise UsageError(
                    f"{key}.{field}: table {table.name!r} has no column {name!r}{did_you_mean(name, table.columns)}",
                    where=str(contract.path),
                    fix=f"columns of {table.name}: {', '.join(table.columns)}",
                )
