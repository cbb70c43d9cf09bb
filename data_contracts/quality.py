"""Quality rules of a contract: which are checked, and how many offending rows each allows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

GX_ENGINES = ("greatexpectations", "great-expectations", "great_expectations")
COLUMN_METRICS = ("nullValues", "missingValues", "invalidValues", "duplicateValues")
TABLE_METRICS = ("rowCount", "duplicateValues")
UPPER_BOUNDS = ("mustBe", "mustBeLessThan", "mustBeLessOrEqualTo")
COUNT_BOUNDS = (*UPPER_BOUNDS, "mustBeGreaterThan", "mustBeGreaterOrEqualTo", "mustBeBetween")
OPERATORS = (*COUNT_BOUNDS, "mustNotBe", "mustNotBeBetween")


class RuleError(ValueError):
    """A rule that would not be checked as written; ``fix`` says what to write."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.fix = fix


def check_rule(rule: Mapping[str, Any], *, of_table: bool) -> bool:
    """Whether a quality rule is to be evaluated; ``type: text`` is documentation and is not.

    Raises:
        RuleError: the rule could not be evaluated as it is written.
    """
    kind = rule.get("type", "library")
    if kind == "text":
        return False
    if kind == "sql":
        raise RuleError("quality rules in SQL are not checked", "use a metric, or a great-expectations rule")
    if kind == "custom":
        if str(rule.get("engine", "")).lower() not in GX_ENGINES:
            raise RuleError(f"quality engine {rule.get('engine')!r} is not run", "use engine: great-expectations")
        custom_expectation(rule)
        return True
    metric = rule.get("metric")
    known = TABLE_METRICS if of_table else COLUMN_METRICS
    if metric not in known:
        place = "table" if of_table else "column"
        raise RuleError(f"metric {metric!r} is not checked for a {place}", f"use one of {', '.join(known)}")
    _check_arguments(rule, of_table=of_table)
    operator = _operator(rule)
    if metric == "rowCount":
        if operator not in COUNT_BOUNDS or rule.get("unit", "rows") != "rows":
            raise RuleError(
                f"rowCount cannot be checked with {operator}", f"use one of {', '.join(COUNT_BOUNDS)}, in rows"
            )
    elif operator not in UPPER_BOUNDS or (operator == "mustBe" and rule["mustBe"] != 0):
        raise RuleError(f"{metric} cannot be checked with {operator}", "use mustBe: 0 or mustBeLessOrEqualTo")
    elif metric in ("duplicateValues", "missingValues") and allowed_rows(rule, 100) != 0:
        raise RuleError(f"{metric} is checked without tolerance", "use mustBe: 0")
    if rule.get("unit", "rows") not in ("rows", "percent"):
        raise RuleError(f"unknown unit {rule['unit']!r}", "use rows or percent")
    return True


def _check_arguments(rule: Mapping[str, Any], *, of_table: bool) -> None:
    arguments = rule.get("arguments") or {}
    allowed = {
        "invalidValues": {"validValues", "pattern"},
        "missingValues": {"missingValues"},
        "duplicateValues": {"properties"} if of_table else set(),
    }.get(str(rule["metric"]), set())
    unknown = set(arguments) - allowed
    if unknown:
        raise RuleError(
            f"argument {min(unknown)!r} would not be checked", f"use {', '.join(sorted(allowed)) or 'none'}"
        )
    if allowed and len(set(arguments) & allowed) != 1:
        raise RuleError(f"{rule['metric']} needs one argument", f"add one of {', '.join(sorted(allowed))}")
    for name in ("validValues", "missingValues", "properties"):
        if name in arguments and not (isinstance(arguments[name], list) and arguments[name]):
            raise RuleError(f"argument {name!r} is a list", f"write {name}: [a, b]")


def _operator(rule: Mapping[str, Any]) -> str:
    return next((name for name in OPERATORS if name in rule), "no operator")


def allowed_rows(rule: Mapping[str, Any], rows: int) -> int:
    """How many of ``rows`` rows may break the rule."""
    operator = _operator(rule)
    bound = float(rule[operator])
    if rule.get("unit") == "percent":
        bound = round(bound * rows / 100, 9)
    return max(0, math.ceil(bound) - 1 if operator == "mustBeLessThan" else math.floor(bound))


def row_count_range(rule: Mapping[str, Any]) -> tuple[int, int | None]:
    """Fewest and most rows that a ``rowCount`` rule allows; never fewer than one."""
    operator = _operator(rule)
    value = rule[operator]
    low = 1
    high: int | None = None
    if operator in ("mustBeGreaterThan", "mustBeGreaterOrEqualTo"):
        low = math.floor(value) + 1 if operator == "mustBeGreaterThan" else math.ceil(value)
    elif operator in ("mustBeLessThan", "mustBeLessOrEqualTo"):
        high = math.ceil(value) - 1 if operator == "mustBeLessThan" else math.floor(value)
    else:
        lowest, highest = value if operator == "mustBeBetween" else (value, value)
        low, high = math.ceil(lowest), math.floor(highest)
    return max(1, low), high


def custom_expectation(rule: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Type and arguments of a Great Expectations rule, written as a mapping or as YAML text.

    Raises:
        RuleError: it is neither, or names no expectation.
    """
    fix = "write implementation: {type: expect_…, kwargs: {…}}"
    implementation = rule.get("implementation")
    if isinstance(implementation, str):
        from ruamel.yaml import YAML
        from ruamel.yaml.error import YAMLError

        try:
            implementation = YAML(typ="safe", pure=True).load(implementation)
        except YAMLError:
            raise RuleError("the implementation is not valid YAML", fix) from None
    if not isinstance(implementation, dict) or set(implementation) - {"type", "expectation_type", "kwargs"}:
        raise RuleError("the implementation is no Great Expectations rule", fix)
    name = implementation.get("type", implementation.get("expectation_type"))
    arguments = implementation.get("kwargs", {})
    if not isinstance(name, str) or not name.startswith("expect_") or not isinstance(arguments, dict):
        raise RuleError("the implementation names no expectation", fix)
    return name, arguments
