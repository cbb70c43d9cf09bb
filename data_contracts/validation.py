"""A contract against rows: strict types (pydantic), every rule (Great Expectations), references between tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_contracts.contract import DataContract, Table
from data_contracts.expectations import TYPE_PROBLEM, Broken, Frame, evaluate
from data_contracts.report import KEPT, RowFailure, ValidationReport, shown
from data_contracts.rows import RowTypes
from data_contracts.sources import Rows, iterate
from infra.errors import UsageError
from infra.hashing import canonical_json

Tables = Mapping[str, Sequence[Mapping[str, Any]]]

__all__ = ["RowFailure", "Tables", "ValidationReport", "validate"]


def validate(contract: DataContract, tables: Tables, docs: Path | None = None) -> ValidationReport:
    """Check all tables of a contract.

    Args:
        contract: the rules.
        tables: rows per table, as :func:`data_contracts.sources.read_table` gives them.
        docs: folder for Data Docs (static HTML); ``None`` = none.

    Returns:
        The report; it does not raise for broken rows (see :meth:`ValidationReport.raise_on_failure`). A table without
        rows fails, and so does a line that could not be read.

    Raises:
        UsageError: a table of the contract was not read, or a rule cannot be evaluated.
    """
    missing = [name for name in contract.tables if name not in tables]
    if missing:
        raise UsageError(
            f"table {missing[0]!r} was not read", where=str(contract.path), fix="read every table of the contract"
        )
    failures: dict[str, list[RowFailure]] = {}
    frames = []
    for name, table in contract.tables.items():
        failures[name] = list(_rejected(tables[name]))
        frame, found = _check_types(table, tables)
        failures[name] += found
        frames.append(frame)
    counts, broken = evaluate(frames, docs)
    for frame in frames:
        name = frame.table.name
        typed = {(failure.row, failure.column) for failure in failures[name]}
        failures[name] += [f for b in broken[name] for f in _of_rule(frame, b) if (f.row, f.column) not in typed]
        failures[name] += _references(contract, tables, frame.table)
        failures[name].sort(key=lambda failure: (failure.row is not None, failure.row or 0))
    found_all = [failure for name in contract.tables for failure in failures[name]]
    return ValidationReport(
        success=not found_all,
        contract_hash=contract.content_hash,
        rows={name: len(tables[name]) for name in contract.tables},
        rejected={name: len(_rejected(tables[name])) for name in contract.tables},
        expectations=counts,
        failure_count=len(found_all),
        failures=tuple(found_all[:KEPT]),
    )


def _rejected(rows: Sequence[Mapping[str, Any]]) -> tuple[RowFailure, ...]:
    return rows.rejected if isinstance(rows, Rows) else ()


def _check_types(table: Table, tables: Tables) -> tuple[Frame, list[RowFailure]]:
    """The frame for Great Expectations (a value of a wrong type is left out of it) and the type failures."""
    types = RowTypes(table)
    failures: list[RowFailure] = []
    columns: dict[str, list[Any]] = {name: [] for name in (*table.columns, TYPE_PROBLEM)}
    positions: list[int] = []
    unknown: Counter[str] = Counter()
    for position, row in iterate(tables, table.name):
        found = types.failures(row)
        wrong = {failure.column for failure in found}
        unknown.update(key for key in row if key not in table.columns)
        failures += [
            RowFailure(table=table.name, row=position, column=f.column, rule=f.rule, value=shown(f.value))
            for f in found
        ]
        for name in table.columns:
            columns[name].append(None if name in wrong else _plain(row.get(name)))
        columns[TYPE_PROBLEM].append("; ".join(f"{f.column}: {f.rule}" for f in found) or None)
        positions.append(position)
    for name, count in unknown.items():
        rule = f"not in the contract ({count:,} rows have it)"
        failures.append(RowFailure(table=table.name, row=None, column=name, rule=rule))
    return Frame(table, columns, positions), failures


def _plain(value: Any) -> Any:
    """A value that pandas can compare and hash: nested ones as canonical JSON."""
    return canonical_json(value) if isinstance(value, dict | list) else value


def _of_rule(frame: Frame, broken: Broken) -> list[RowFailure]:
    rule, name = broken.expectation, frame.table.name
    if rule.column == TYPE_PROBLEM:
        return []  # each of these is in the report already, with its column and value
    if not broken.rows:
        value = None if broken.observed is None else shown(broken.observed)
        return [RowFailure(table=name, row=None, column=rule.column, rule=rule.rule, value=value)]
    at = {position: index for index, position in enumerate(frame.positions)}
    names = [rule.column] if rule.column is not None else list(rule.arguments.get("column_list", ()))
    result = []
    for row in broken.rows:
        values = [frame.columns[column][at[row]] for column in names]
        value = shown(values[0] if len(values) == 1 else tuple(values))
        result.append(RowFailure(table=name, row=row, column=", ".join(names) or None, rule=rule.rule, value=value))
    return result


def _references(contract: DataContract, tables: Tables, table: Table) -> list[RowFailure]:
    failures = []
    for column in table.columns.values():
        if column.reference is None:
            continue
        target, key = column.reference
        known = {_plain(row.get(key)) for row in tables[target]}
        rule = f"must be in {target}.{key}"
        for position, row in iterate(tables, table.name):
            value = row.get(column.name)
            if value is not None and _plain(value) not in known:
                failures.append(
                    RowFailure(table=table.name, row=position, column=column.name, rule=rule, value=shown(value))
                )
    return failures
