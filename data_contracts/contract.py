"""Data contracts: Open Data Contract Standard 3.1, checked with its own JSON schema, read into small typed records."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time
from functools import cached_property
from pathlib import Path
from typing import Any

from infra.errors import UsageError
from infra.hashing import content_hash
from infra.yaml_file import Keys, YamlFile, did_you_mean

SUPPORTED_OPTIONS: Mapping[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset({"multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "format"}),
    "number": frozenset({"multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "boolean": frozenset(),
    "date": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "timestamp": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "timezone"}),
    "time": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "object": frozenset({"minProperties", "maxProperties", "required"}),
    "array": frozenset({"minItems", "maxItems", "uniqueItems"}),
}
"""Logical types and those of their options that are checked; any other option is refused, never ignored."""

ASCII = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[A-Za-z0-9_]", r"\W": "[^A-Za-z0-9_]"}
ASCII_IN_CLASS = {r"\d": "0-9", r"\w": "A-Za-z0-9_"}

TABLE_PROPERTIES = ("server", "query")


@dataclass(frozen=True)
class Column:
    """One property of a table, or of an object inside a column."""

    name: str
    logical_type: str
    physical_name: str = ""
    required: bool = False
    unique: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    quality: tuple[Mapping[str, Any], ...] = ()
    reference: tuple[str, str] | None = None
    """Table and column which must hold every value of this one."""
    items: Column | None = None
    properties: tuple[Column, ...] = ()


@dataclass(frozen=True)
class Table:
    """One table: its columns, keys and rules, and where it is read from."""

    name: str
    physical_name: str
    server: str
    query: str | None
    columns: Mapping[str, Column]
    primary_key: tuple[str, ...] = ()
    quality: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Server:
    """One source. ``location`` is an SQLAlchemy URL, ``python://file.py:function``, or a file's path."""

    name: str
    type: str
    location: str
    format: str = ""
    delimiter: str = ","
    encoding: str = "utf-8"


@dataclass(frozen=True)
class DataContract:
    """A validated contract."""

    path: Path
    values: Mapping[str, Any]
    """The file's content as plain JSON values."""
    tables: Mapping[str, Table]
    servers: Mapping[str, Server]

    @cached_property
    def content_hash(self) -> str:
        """sha256 of the contract's content; comments, order of keys and layout do not count."""
        return content_hash(self.values)

    @classmethod
    def load(cls, path: Path) -> DataContract:
        """Read and check a contract.

        Raises:
            UsageError: missing file, broken YAML, a key or value that ODCS does not allow, or a rule that would not
                be checked; names file, line and key, and the fix.
        """
        file = YamlFile.read(path)
        values = _json_values(file)
        _check_standard(file, values)
        return _Reader(file, values).read()


def ecma_pattern(pattern: str) -> str:
    r"""A contract's pattern (ECMA-262, as in JSON schema) for Python's ``re``.

    There ``$`` also matches before a final newline, and ``\d`` and ``\w`` know the digits and letters of all scripts.
    """
    parts, in_class, index = [], False, 0
    while index < len(pattern):
        character = pattern[index]
        if character == "\\":
            escape = pattern[index : index + 2]
            parts.append((ASCII_IN_CLASS if in_class else ASCII).get(escape, escape))
            index += 2
            continue
        in_class = character == "[" or (in_class and character != "]")
        parts.append(r"\Z" if character == "$" and not in_class else character)
        index += 1
    return "".join(parts)


class _Reader:
    """Turns checked ODCS values into records; refuses what would otherwise be silently ignored."""

    def __init__(self, file: YamlFile, values: dict[str, Any]) -> None:
        from open_data_contract_standard.model import OpenDataContractStandard

        self.file = file
        self.values = values
        self.odcs = OpenDataContractStandard.model_validate(values)

    def read(self) -> DataContract:
        servers = [self._server(server, ("servers", i)) for i, server in enumerate(self.odcs.servers or [])]
        if not servers:
            raise self._error("the contract names no server", ("servers",), "add `servers:` and say where the data is")
        names = [server.name for server in servers]
        self._distinct(names, "server", ("servers",))
        tables = [self._table(table, ("schema", i), names) for i, table in enumerate(self.odcs.schema_ or [])]
        if not tables:
            raise self._error("the contract describes no table", ("schema",), "add `schema:` with a table")
        self._distinct([table.name for table in tables], "table", ("schema",))
        contract = DataContract(
            self.file.path,
            self.values,
            {table.name: table for table in tables},
            {server.name: server for server in servers},
        )
        self._check_references(contract)
        return contract

    def _server(self, server: Any, keys: Keys) -> Server:
        raw = self.values["servers"][keys[1]]
        known = {info.alias or name for name, info in type(server).model_fields.items()}
        for key in raw:
            if key not in known:
                hint = did_you_mean(key, known)
                raise self._error(f"unknown key {key}{hint}", (*keys, key), "remove it, or put it in customProperties")
        if server.type == "local":
            if server.format not in ("jsonl", "csv", "parquet"):
                raise self._error(
                    f"unknown file format {server.format!r}", (*keys, "format"), "use jsonl, csv or parquet"
                )
            custom = {item.property: item.value for item in server.customProperties or []}
            delimiter, encoding = str(custom.get("delimiter", ",")), str(custom.get("encoding", "utf-8"))
            if len(delimiter) != 1:
                raise self._error(
                    "a CSV delimiter is one character", (*keys, "delimiter"), "for example `delimiter: ';'`"
                )
            return Server(server.server, "local", server.path, server.format, delimiter, encoding)
        if server.type != "custom":
            raise self._error(
                f"servers of type {server.type!r} cannot be read directly",
                (*keys, "type"),
                "use `type: custom` and `location:` with an SQLAlchemy URL, e.g. postgresql+psycopg://${DB_USER}@host/db",
            )
        if not server.location or "://" not in server.location:
            raise self._error(
                "a custom server needs a location",
                (*keys, "location"),
                "write an SQLAlchemy URL, or python://file.py:function for a function in the domain folder",
            )
        return Server(server.server, "custom", server.location)

    def _table(self, table: Any, keys: Keys, servers: Sequence[str]) -> Table:
        custom = {item.property: item.value for item in table.customProperties or []}
        for name in custom:
            if name not in TABLE_PROPERTIES and did_you_mean(name, TABLE_PROPERTIES):
                hint = did_you_mean(name, TABLE_PROPERTIES)
                raise self._error(f"unknown custom property {name!r}{hint}", (*keys, "customProperties"), "rename it")
        server = custom.get("server", servers[0])
        if server not in servers:
            hint = did_you_mean(str(server), servers)
            raise self._error(
                f"no server {server!r}{hint}", (*keys, "customProperties"), f"servers: {', '.join(servers)}"
            )
        query = custom.get("query")
        if query is not None and not isinstance(query, str):
            raise self._error("a query is a text", (*keys, "customProperties"), "quote the SQL")
        if table.relationships:
            fix = "write `relationships: [{to: table.column}]` at the column"
            raise self._error("relationships between several columns are not checked", (*keys, "relationships"), fix)
        properties = table.properties or []
        if not properties:
            raise self._error(f"table {table.name!r} has no columns", keys, "add `properties:`")
        columns = [self._column(item, (*keys, "properties", i)) for i, item in enumerate(properties)]
        self._distinct([column.name for column in columns], "column", (*keys, "properties"))
        keyed = [item for item in properties if item.primaryKey]
        keyed.sort(key=lambda item: item.primaryKeyPosition if item.primaryKeyPosition is not None else 0)
        return Table(
            name=table.name,
            physical_name=table.physicalName or table.name,
            server=str(server),
            query=query,
            columns={column.name: column for column in columns},
            primary_key=tuple(item.name for item in keyed),
            quality=self._quality(table.quality, (*keys, "quality")),
        )

    def _column(self, item: Any, keys: Keys, nested: bool = False) -> Column:
        name = item.name or "items"
        if item.logicalType is None:
            types = ", ".join(SUPPORTED_OPTIONS)
            raise self._error(f"column {name!r} has no logicalType", keys, f"add `logicalType:` ({types})")
        options = item.logicalTypeOptions or {}
        for option in options:
            if option not in SUPPORTED_OPTIONS[item.logicalType]:
                where = (*keys, "logicalTypeOptions", option)
                raise self._error(f"option {option!r} of column {name!r} would not be checked", where, "remove it")
        self._check_options(item.logicalType, options, (*keys, "logicalTypeOptions"))
        if nested and (item.quality or item.relationships or item.unique or item.primaryKey or item.physicalName):
            fix = "keep to types and logicalTypeOptions there"
            raise self._error("quality rules, keys and names inside a column are not checked", keys, fix)
        return Column(
            name=name,
            logical_type=item.logicalType,
            physical_name=item.physicalName or name,
            required=bool(item.required or item.primaryKey),
            unique=bool(item.unique),
            options=options,
            quality=self._quality(item.quality, (*keys, "quality")),
            reference=self._reference(item, keys),
            items=self._column(item.items, (*keys, "items"), nested=True) if item.items is not None else None,
            properties=tuple(
                self._column(part, (*keys, "properties", i), nested=True)
                for i, part in enumerate(item.properties or [])
            ),
        )

    def _check_options(self, logical_type: str, options: Mapping[str, Any], keys: Keys) -> None:
        from data_contracts.logical_types import STRING_FORMATS, TEMPORAL

        if "pattern" in options:
            self._check_pattern(options["pattern"], (*keys, "pattern"))
        if logical_type == "string" and options.get("format", "uuid") not in STRING_FORMATS:
            fix = f"use one of {', '.join(sorted(STRING_FORMATS))}, or a pattern"
            raise self._error(f"format {options['format']!r} would not be checked", (*keys, "format"), fix)
        if logical_type in TEMPORAL:
            for option, value in options.items():
                if option == "timezone":
                    continue
                try:
                    TEMPORAL[logical_type](value)
                except ValueError:
                    fix = f"write an ISO 8601 {logical_type}"
                    raise self._error(f"{value!r} is no {logical_type}", (*keys, option), fix) from None

    def _check_pattern(self, pattern: object, keys: Keys) -> None:
        try:
            re.compile(ecma_pattern(str(pattern)))
        except re.error as error:
            fix = "correct the regular expression"
            raise self._error(f"pattern {pattern!r} is no regular expression: {error}", keys, fix) from None

    def _quality(self, rules: Sequence[Any] | None, keys: Keys) -> tuple[Mapping[str, Any], ...]:
        from data_contracts.quality import RuleError, check_rule

        result = []
        for index, rule in enumerate(rules or []):
            values = rule.model_dump(exclude_none=True)
            try:
                checked = check_rule(values, of_table=keys[-3] == "schema")
            except RuleError as error:
                raise self._error(str(error), (*keys, index), error.fix) from None
            pattern = (values.get("arguments") or {}).get("pattern")
            if pattern is not None:
                self._check_pattern(pattern, (*keys, index))
            if checked:
                result.append(values)
        return tuple(result)

    def _reference(self, item: Any, keys: Keys) -> tuple[str, str] | None:
        found = item.relationships or []
        if not found:
            return None
        to = found[0].to
        if len(found) > 1 or not isinstance(to, str) or to.count(".") != 1:
            where = (*keys, "relationships")
            raise self._error("this relationship would not be checked", where, "write one `{to: table.column}`")
        table, _, column = to.partition(".")
        return table, column

    def _check_references(self, contract: DataContract) -> None:
        for index, table in enumerate(contract.tables.values()):
            for number, column in enumerate(table.columns.values()):
                if column.reference is None:
                    continue
                target, name = column.reference
                if target not in contract.tables or name not in contract.tables[target].columns:
                    where = ("schema", index, "properties", number, "relationships")
                    raise self._error(
                        f"relationship to {target}.{name}, which is not in the contract", where, "correct it"
                    )

    def _distinct(self, names: Sequence[str], kind: str, keys: Keys) -> None:
        for index, name in enumerate(names):
            if name in names[:index]:
                raise self._error(f"two entries for {kind} {name!r}", (*keys, index), "rename or remove one")

    def _error(self, what: str, keys: Keys, fix: str) -> UsageError:
        return UsageError(what, where=self.file.where(keys), fix=fix)


def _json_values(file: YamlFile) -> dict[str, Any]:
    """The file's content with dates as ISO texts; refuses what JSON cannot hold."""

    def plain(value: Any, keys: Keys) -> Any:
        if isinstance(value, Mapping):
            return {str(key): plain(part, (*keys, key)) for key, part in value.items()}
        if isinstance(value, list):
            return [plain(part, (*keys, index)) for index, part in enumerate(value)]
        if isinstance(value, date | datetime | time):
            return value.isoformat()
        if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
            return value
        raise UsageError(
            f"{value!r} cannot be used in a contract", where=file.where(keys), fix="write text or a number"
        )

    try:
        result: dict[str, Any] = plain(file.values, ())
    except RecursionError:
        raise UsageError("the contract refers to itself", where=str(file.path), fix="remove the YAML alias") from None
    return result


def _check_standard(file: YamlFile, values: dict[str, Any]) -> None:
    """Check with the standard's own JSON schema; the deepest error is the cause, the others follow from it."""
    from jsonschema import Draft201909Validator
    from jsonschema.exceptions import ValidationError

    schema = _standard_schema()
    version = values.get("apiVersion")
    if version is not None and not str(version).startswith("v3."):
        raise UsageError(
            f"apiVersion {version!r} is not supported",
            where=file.where(("apiVersion",)),
            fix="write apiVersion: v3.1.0",
        )
    _check_types_named(file, values)
    leaves: list[ValidationError] = []
    waiting = list(Draft201909Validator(schema).iter_errors(values))
    while waiting:
        error = waiting.pop()
        waiting.extend(error.context or ())
        leaves.append(error)
    if not leaves:
        return

    def rank(error: ValidationError) -> tuple[int, bool, str]:
        return (-len(error.absolute_path), error.validator == "unevaluatedProperties", error.message)

    error = min(leaves, key=rank)
    keys: Keys = tuple(error.absolute_path)
    name = ".".join(map(str, keys)) or "the contract"
    if error.validator in ("unevaluatedProperties", "additionalProperties"):
        unknown = re.findall(r"'([^']*)'", error.message.rpartition("(")[2])[0]
        hint = did_you_mean(unknown, _names_in(schema) - {unknown})
        fix = "correct or remove it; own data goes into customProperties"
        raise UsageError(f"unknown key {unknown} in {name}{hint}", where=file.where((*keys, unknown)), fix=fix)
    if error.validator == "required":
        fix = "add it; the Open Data Contract Standard asks for it"
        raise UsageError(f"{name}: {error.message}", where=file.where(keys), fix=fix)
    message = error.message if len(error.message) <= 240 else f"{error.message[:240]}…"
    raise UsageError(f"{name}: {message}", where=file.where(keys), fix="see the Open Data Contract Standard 3.1")


def _check_types_named(file: YamlFile, values: Mapping[str, Any]) -> None:
    """Without a logicalType the standard's schema tries every type and blames an innocent option."""
    tables = values.get("schema")
    for index, table in enumerate(tables if isinstance(tables, list) else []):
        columns = table.get("properties") if isinstance(table, Mapping) else None
        for number, column in enumerate(columns if isinstance(columns, list) else []):
            if isinstance(column, Mapping) and "logicalType" not in column:
                where = file.where(("schema", index, "properties", number))
                types = ", ".join(SUPPORTED_OPTIONS)
                what = f"column {column.get('name', number)!r} has no logicalType"
                raise UsageError(what, where=where, fix=f"add `logicalType:` ({types})")


def _standard_schema() -> dict[str, Any]:
    """The ODCS 3.1 JSON schema that ``datacontract-cli`` ships (found without importing it: its import is slow)."""
    spec = importlib.util.find_spec("datacontract")
    if spec is None or not spec.submodule_search_locations:
        raise UsageError("datacontract-cli is not installed", fix="pip install datacontract-cli")
    text = (Path(spec.submodule_search_locations[0]) / "schemas" / "odcs-3.1.0.schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def _names_in(schema: Any) -> set[str]:
    if isinstance(schema, Mapping):
        own = set(schema["properties"]) if isinstance(schema.get("properties"), Mapping) else set()
        return own.union(*map(_names_in, schema.values()))
    return set().union(*map(_names_in, schema)) if isinstance(schema, list) else set()
