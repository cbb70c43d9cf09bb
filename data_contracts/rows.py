"""Rows against a contract's types: strict pydantic models, so that nothing is coerced on the way."""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic_core import ErrorDetails

from data_contracts.contract import Column, Table, ecma_pattern
from data_contracts.logical_types import STRING_FORMATS, TEMPORAL, integer_range
from data_contracts.strict_json import parse_json
from infra.hashing import canonical_json

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())
BOUNDS = {
    "minimum": "ge",
    "maximum": "le",
    "exclusiveMinimum": "gt",
    "exclusiveMaximum": "lt",
    "multipleOf": "multiple_of",
}
LENGTHS = {"minLength": "min_length", "maxLength": "max_length"}
ITEMS = {"minItems": "min_length", "maxItems": "max_length"}
PROPERTIES = {"minProperties": "min_length", "maxProperties": "max_length"}


@dataclass(frozen=True)
class TypeFailure:
    """A value of the wrong type, or one that breaks a rule inside a nested value."""

    column: str
    rule: str
    value: Any


class RowTypes:
    """Checks rows of one table. Missing values pass here: whether they may be missing is another rule."""

    def __init__(self, table: Table) -> None:
        self._table = table
        fields: dict[str, Any] = {
            f"c{index}": (annotation(column, nested=False) | None, Field(default=None, alias=column.name))
            for index, column in enumerate(table.columns.values())
        }
        self._model: type[BaseModel] = create_model("Row", __config__=STRICT, **fields)

    def failures(self, row: Mapping[str, Any]) -> list[TypeFailure]:
        """Everything wrong with the types of one row."""
        try:
            self._model.model_validate(row)
        except ValidationError as error:
            return list(self._explain(row, error.errors(include_url=False, include_context=False)))
        return []

    def _explain(self, row: Mapping[str, Any], problems: list[ErrorDetails]) -> Iterator[TypeFailure]:
        for problem in problems:
            column = str(problem["loc"][0])
            if problem["type"] == "extra_forbidden" and len(problem["loc"]) == 1:
                continue  # reported once per table, not per row
            inner = ".".join(map(str, problem["loc"][1:]))
            message = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
            declared = self._table.columns[column].logical_type
            value = problem["input"] if inner else row[column]
            if declared in ("array", "object") and isinstance(value, str) and not inner:
                message = _json_problem(value) or message
            yield TypeFailure(column, f"{declared}: {inner + ': ' if inner else ''}{message}", value)


def _json_problem(text: str) -> str | None:
    try:
        parse_json(text)
    except ValueError as error:
        return str(error)
    return None


def annotation(column: Column, *, nested: bool) -> Any:
    """The pydantic type of a column.

    ``nested``: inside another value, where pydantic checks every option; the patterns, lengths and bounds of a whole
    column are Great Expectations' to check.
    """
    options = column.options
    if column.logical_type == "string":
        return _string(options, nested=nested)
    if column.logical_type in ("integer", "number"):
        kind: Any = int if column.logical_type == "integer" else float
        limits = _renamed(options, BOUNDS if nested else {"multipleOf": "multiple_of"})
        checks: list[Any] = [Field(**limits)] if limits else []
        if "format" in options:
            low, high = integer_range(options["format"])
            checks.append(Field(ge=low, le=high))
        return Annotated[kind, *checks] if checks else kind
    if column.logical_type == "boolean":
        return bool
    if column.logical_type in TEMPORAL:
        return Annotated[str, AfterValidator(_temporal(column.logical_type, options))]
    if column.logical_type == "array":
        items: Any = annotation(column.items, nested=True) if column.items is not None else Any
        checks = [Field(**_renamed(options, ITEMS)), AfterValidator(_serialisable)]
        if options.get("uniqueItems"):
            checks.append(AfterValidator(_distinct))
        return Annotated[types.GenericAlias(list, (items,)), *checks]
    return _object(column)


def _string(options: Mapping[str, Any], *, nested: bool) -> Any:
    checks: list[Any] = [AfterValidator(_writable)]
    if nested:
        checks.append(Field(**_renamed(options, LENGTHS)))
        if "pattern" in options:
            checks.append(AfterValidator(_matches(options["pattern"])))
    if options.get("format") in STRING_FORMATS:
        checks.append(AfterValidator(_conforms(options["format"])))
    return Annotated[str, *checks]


def _writable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half a surrogate pair, which is no text") from None
    return text


def _object(column: Column) -> Any:
    checks = [Field(**_renamed(column.options, PROPERTIES)), AfterValidator(_serialisable)]
    names = column.options.get("required")
    if names:
        checks.append(AfterValidator(_has(tuple(names))))
    if column.properties:
        checks.append(AfterValidator(_shaped(column)))
    return Annotated[dict[str, Any], *checks]


def _shaped(column: Column) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The check that an object holds exactly the declared properties."""
    fields: dict[str, Any] = {}
    for index, part in enumerate(column.properties):
        kind = annotation(part, nested=True)
        name = Field(alias=part.name) if part.required else Field(default=None, alias=part.name)
        fields[f"p{index}"] = (kind if part.required else kind | None, name)
    model: type[BaseModel] = create_model("Object", __config__=STRICT, **fields)

    def check(value: dict[str, Any]) -> dict[str, Any]:
        try:
            model.model_validate(value)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_context=False)[0]
            place = ".".join(map(str, problem["loc"]))
            raise ValueError(
                f"{place}: {problem['msg'].removeprefix('Value error, ').removeprefix('Input ')}"
            ) from None
        return value

    return check


def _has(names: tuple[str, ...]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def check(value: dict[str, Any]) -> dict[str, Any]:
        missing = [name for name in names if name not in value]
        if missing:
            raise ValueError(f"without {', '.join(missing)}")
        return value

    return check


def _serialisable(value: Any) -> Any:
    try:
        canonical_json(value).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot be written as JSON: {error}") from None
    return value


def _distinct(value: list[Any]) -> list[Any]:
    if len({canonical_json(item) for item in value}) != len(value):
        raise ValueError("items are not unique")
    return value


def _temporal(logical_type: str, options: Mapping[str, Any]) -> Callable[[str], str]:
    parse = TEMPORAL[logical_type]
    comparisons: Mapping[str, tuple[str, Callable[[Any, Any], bool]]] = {
        "minimum": ("before", lambda value, bound: value >= bound),
        "maximum": ("after", lambda value, bound: value <= bound),
        "exclusiveMinimum": ("not after", lambda value, bound: value > bound),
        "exclusiveMaximum": ("not before", lambda value, bound: value < bound),
    }
    bounds = [(*comparisons[name], options[name], parse(options[name])) for name in comparisons if name in options]

    def check(text: str) -> str:
        try:
            value = parse(text)
        except ValueError:
            raise ValueError(f"should be an ISO 8601 {logical_type}") from None
        if options.get("timezone") and value.tzinfo is None:
            raise ValueError("should name its time zone")
        for word, holds, shown, bound in bounds:
            try:
                fine = holds(value, bound)
            except TypeError:
                raise ValueError(f"cannot be compared with {shown}: one of them has no time zone") from None
            if not fine:
                raise ValueError(f"is {word} {shown}")
        return text

    return check


def _matches(pattern: str) -> Callable[[str], str]:
    compiled = re.compile(ecma_pattern(pattern))

    def check(text: str) -> str:
        if compiled.search(text) is None:
            raise ValueError(f"should match {pattern}")
        return text

    return check


def _conforms(name: str) -> Callable[[str], str]:
    checker = _format_checker()

    def check(text: str) -> str:
        if not checker.conforms(text, name):
            raise ValueError(f"should be a valid {name}")
        return text

    return check


@lru_cache(maxsize=1)
def _format_checker() -> Any:
    from jsonschema import FormatChecker

    return FormatChecker()


def _renamed(options: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {theirs: options[ours] for ours, theirs in names.items() if ours in options}
