"""Reading tables: SQL databases, JSONL, CSV, Parquet, or a Python function in the domain folder.

Values arrive as they are: no type is guessed, only text that stands for a declared type is read as that type.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_contracts.contract import DataContract, Server, Table
from data_contracts.report import RowFailure, shown
from data_contracts.strict_json import parse_json
from data_contracts.values import native_value, text_value
from infra.errors import UsageError
from infra.yaml_file import did_you_mean

VARIABLE = re.compile(r"\$\{([^}]*)\}")
PYTHON = "python://"


class Rows(list[dict[str, Any]]):
    """The rows of a table, where each came from, and the lines that could not be read."""

    def __init__(
        self,
        rows: Iterable[dict[str, Any]] = (),
        positions: Sequence[int] | None = None,
        rejected: Sequence[RowFailure] = (),
    ) -> None:
        super().__init__(rows)
        self.positions = list(positions) if positions is not None else list(range(1, len(self) + 1))
        """Line (text files) or number from 1 (everything else) of each row."""
        self.rejected = tuple(rejected)


def read_table(contract: DataContract, table: str, base: Path, variables: Mapping[str, str]) -> Rows:
    """All rows of a table, with the contract's column names.

    Args:
        contract: says where the table is.
        table: its name in the contract.
        base: the domain's folder; relative paths and ``python://`` files are below it.
        variables: values for ``${NAME}`` in locations and paths; the process environment comes second.

    Raises:
        UsageError: a file, table, function or variable that is missing, a database that cannot be reached, a query
            that fails, or a file that is no such format. Single broken lines are kept in ``rejected`` instead.
    """
    declared = contract.tables[table]
    server = contract.servers[declared.server]
    location = expand(server.location.replace("{table}", declared.physical_name), variables, str(contract.path))
    if server.type == "local":
        rows = _read_file(base / location, declared, server)
    elif declared.query is None and location.startswith(PYTHON):
        from data_contracts.python_source import call_function

        made = call_function(location.removeprefix(PYTHON), base, variables)
        rows = Rows({name: native_value(row[name], _type(declared, name)) for name in row} for row in made)
    else:
        from data_contracts.sql_source import read_sql

        made = read_sql(location, declared, base)
        rows = Rows({name: native_value(row[name], _type(declared, name), sql=True) for name in row} for row in made)
    return _renamed(rows, declared)


def expand(text: str, variables: Mapping[str, str], where: str) -> str:
    """``text`` with every ``${NAME}`` replaced.

    Raises:
        UsageError: neither ``variables`` nor the environment has the name.
    """

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if name in variables:
            return variables[name]
        if name in os.environ:
            return os.environ[name]
        raise UsageError(
            f"the variable {name!r} is not set", where=where, fix=f"export {name}=… or correct the location"
        )

    return VARIABLE.sub(value, text)


def _type(table: Table, physical: str) -> str | None:
    return next((c.logical_type for c in table.columns.values() if c.physical_name == physical), None)


def _renamed(rows: Rows, table: Table) -> Rows:
    names = {c.physical_name: c.name for c in table.columns.values() if c.physical_name != c.name}
    if not names:
        return rows
    renamed = ({names.get(key, key): value for key, value in row.items()} for row in rows)
    return Rows(renamed, rows.positions, rows.rejected)


def _read_file(path: Path, table: Table, server: Server) -> Rows:
    if not path.is_file():
        near = did_you_mean(path.name, [p.name for p in path.parent.iterdir()]) if path.parent.is_dir() else ""
        raise UsageError(
            f"the file of table {table.name!r} does not exist{near}", where=str(path), fix="correct the server's path"
        )
    if server.format == "jsonl":
        return _read_jsonl(path, table)
    if server.format == "csv":
        return _read_csv(path, table, server)
    return _read_parquet(path, table)


def _read_jsonl(path: Path, table: Table) -> Rows:
    rows, lines, rejected = [], [], []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            value = parse_json(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            if not isinstance(value, dict):
                raise ValueError("not a JSON object")
        except ValueError as error:  # UnicodeDecodeError is one too
            problem = "not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
            rejected.append(
                RowFailure(
                    table=table.name, row=number, column=None, rule=problem, value=shown(line.decode(errors="replace"))
                )
            )
            continue
        rows.append({name: native_value(value[name], _type(table, name)) for name in value})
        lines.append(number)
    return Rows(rows, lines, rejected)


def _read_csv(path: Path, table: Table, server: Server) -> Rows:
    """Rows of a CSV file with a header line. An empty cell is a missing value; ``NA`` or ``null`` is text."""
    encoding = "utf-8-sig" if server.encoding.lower().replace("-", "") == "utf8" else server.encoding
    try:
        text = path.read_bytes().decode(encoding)
    except (UnicodeDecodeError, LookupError) as error:
        raise UsageError(
            f"{path.name} is not {server.encoding} text: {error}", where=str(path), fix="set the server's encoding"
        ) from None
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=server.delimiter, strict=True)
    csv.field_size_limit(1 << 30)
    rows: list[dict[str, Any]] = []
    lines: list[int] = []
    rejected: list[RowFailure] = []
    try:
        header = next(reader, [])
        if len(set(header)) != len(header) or not all(header):
            fix = "give every column a name of its own in the first line"
            raise UsageError(f"{path.name} has empty or repeated column names", where=f"{path}:1", fix=fix)
        types = [_type(table, name) for name in header]
        start = reader.line_num + 1
        for cells in reader:
            if len(cells) == len(header):
                values = zip(header, cells, types, strict=True)
                rows.append({name: text_value(cell, kind) if cell else None for name, cell, kind in values})
                lines.append(start)
            elif cells:
                rule = f"{len(cells)} cells under {len(header)} column names"
                rejected.append(
                    RowFailure(
                        table=table.name, row=start, column=None, rule=rule, value=shown(server.delimiter.join(cells))
                    )
                )
            start = reader.line_num + 1
    except csv.Error as error:
        raise UsageError(
            f"{path.name} is not valid CSV: {error}", where=f"{path}:{reader.line_num}", fix="look for an open quote"
        ) from None
    return Rows(rows, lines, rejected)


def _read_parquet(path: Path, table: Table) -> Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        content = pq.ParquetFile(path).read()
    except (pa.ArrowException, OSError) as error:
        raise UsageError(
            f"{path.name} is not a Parquet file: {error}",
            where=str(path),
            fix="write it again, or set the server's format",
        ) from None
    columns = content.column_names
    if len(set(columns)) != len(columns):
        raise UsageError(f"{path.name} repeats a column name", where=str(path), fix="rename the column")
    return Rows(
        {name: native_value(_without_padding(row[name]), _type(table, name)) for name in columns}
        for row in content.to_pylist()
    )


def _without_padding(value: Any) -> Any:
    """A nested value without the nulls with which Arrow fills absent keys of a struct."""
    if isinstance(value, dict):
        return {key: _without_padding(part) for key, part in value.items() if part is not None}
    return [_without_padding(part) for part in value] if isinstance(value, list) else value


def iterate(tables: Mapping[str, Sequence[Mapping[str, Any]]], name: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Rows of a table with their position in the source."""
    rows = tables[name]
    positions: Iterable[int] = rows.positions if isinstance(rows, Rows) else range(1, len(rows) + 1)
    yield from zip(positions, rows, strict=True)
