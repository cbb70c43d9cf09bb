"""What validation found: which row broke which rule, and with which value."""

from __future__ import annotations

from typing import Any

from infra.errors import CheckFailed
from infra.records import Record

SHOWN = 20
"""Failures listed in an error message."""
KEPT = 1000
"""Failures kept in a report; ``failure_count`` counts all of them."""
VALUE_CHARACTERS = 120


class RowFailure(Record):
    """One broken rule. ``row`` is the line in a text file, else the row counted from 1; ``None`` = the whole table."""

    table: str
    row: int | None
    column: str | None
    rule: str
    value: str | None = None

    def __str__(self) -> str:
        row = "all rows" if self.row is None else f"row {self.row}"
        column = "" if self.column is None else f", column {self.column}"
        value = "" if self.value is None else f", value {self.value}"
        return f"table {self.table}, {row}{column}: {self.rule}{value}"


class ValidationReport(Record):
    """The verdict on all tables of a contract; plain JSON, without NaN."""

    success: bool
    contract_hash: str
    rows: dict[str, int]
    """Rows read, per table (those which could not be read are not in it)."""
    rejected: dict[str, int]
    """Lines that could not be read, per table."""
    expectations: dict[str, int]
    """Great Expectations evaluated, per table."""
    failure_count: int
    failures: tuple[RowFailure, ...]
    """The first 1,000 failures, by table and row."""

    def raise_on_failure(self) -> None:
        """Stop unless everything held.

        Raises:
            CheckFailed: lists table, row, column, rule and value of the first 20 failures, and the total.
        """
        if not self.success:
            raise contract_broken(self.failures, self.failure_count)


def contract_broken(failures: tuple[RowFailure, ...], count: int, where: str = "") -> CheckFailed:
    """The error for rows that do not satisfy the contract."""
    tables = list(dict.fromkeys(failure.table for failure in failures))
    listed = "\n".join(f"    {failure}" for failure in failures[:SHOWN])
    more = f"\n    … and {count - SHOWN:,} more" if count > SHOWN else ""
    return CheckFailed(
        f"the data breaks its contract in {count:,} place{'s' if count != 1 else ''}:\n{listed}{more}",
        where=where or f"table{'s' if len(tables) > 1 else ''} {', '.join(tables)}",
        fix="correct these rows at the source, or the contract if it asks too much",
    )


def shown(value: Any) -> str:
    """A value for a message: one line, at most 120 characters."""
    text = repr(value)
    return text if len(text) <= VALUE_CHARACTERS else f"{text[: VALUE_CHARACTERS - 1]}…"
