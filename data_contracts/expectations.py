"""A contract's rules as Great Expectations, and their evaluation. Great Expectations is imported on first use only."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_contracts.contract import Column, Table, ecma_pattern
from data_contracts.quality import allowed_rows, custom_expectation, row_count_range
from infra.errors import UsageError

TYPE_PROBLEM = "wrong type"
"""Name of the added column that holds what is wrong with a row's types; empty when all is well."""


@dataclass(frozen=True)
class Expectation:
    """One rule: the name and arguments of a Great Expectations expectation, and how a person would say it."""

    kind: str
    arguments: Mapping[str, Any]
    rule: str
    allowed: int = 0
    """Rows that may break it."""

    @property
    def column(self) -> str | None:
        """The column it is about; ``None`` = several, or the whole table."""
        name = self.arguments.get("column")
        return name if isinstance(name, str) else None


@dataclass(frozen=True)
class Broken:
    """A rule that did not hold; ``rows`` are index values of the frame (none: the whole table)."""

    expectation: Expectation
    rows: tuple[int, ...]
    observed: Any = None


@dataclass(frozen=True)
class Frame:
    """A table ready to be checked: columns of plain values, and per row its number in the source."""

    table: Table
    columns: Mapping[str, Sequence[Any]]
    positions: Sequence[int]


def expectations(table: Table, rows: int) -> tuple[Expectation, ...]:
    """All rules of a table of ``rows`` rows (tolerances in percent depend on that)."""
    made = [
        Expectation("expect_table_row_count_to_be_between", {"min_value": 1}, "row_count: at least 1 row"),
        Expectation("expect_column_values_to_be_null", {"column": TYPE_PROBLEM}, "types as in the contract"),
    ]
    for column in table.columns.values():
        made += _of_column(column, rows)
        if table.primary_key == (column.name,) or column.unique:
            made.append(Expectation("expect_column_values_to_be_unique", {"column": column.name}, "unique"))
    if len(table.primary_key) > 1:
        made.append(_compound(table.primary_key, "unique as a key"))
    for rule in table.quality:
        if rule.get("type") == "custom":
            made.append(_custom(rule, {}))
        elif rule["metric"] == "rowCount":
            low, high = row_count_range(rule)
            arguments = {"min_value": low, "max_value": high}
            limits = f"{low:,} to {high:,}" if high is not None else f"at least {low:,}"
            made.append(Expectation("expect_table_row_count_to_be_between", arguments, f"row_count: {limits}"))
        else:
            names = tuple(rule["arguments"]["properties"])
            unknown = [name for name in names if name not in table.columns]
            if unknown:
                what = f"duplicateValues names {unknown[0]!r}, which is no column of {table.name!r}"
                raise UsageError(what, where="contract", fix=f"columns: {', '.join(table.columns)}")
            made.append(_compound(names, "unique together"))
    return tuple(made)


def _compound(names: tuple[str, ...], rule: str) -> Expectation:
    if len(names) == 1:
        return Expectation("expect_column_values_to_be_unique", {"column": names[0]}, "unique")
    arguments = {"column_list": list(names), "ignore_row_if": "any_value_is_missing"}
    return Expectation("expect_compound_columns_to_be_unique", arguments, f"{rule}: {', '.join(names)}")


def _of_column(column: Column, rows: int) -> list[Expectation]:
    name = {"column": column.name}
    made = []
    if column.required:
        made.append(Expectation("expect_column_values_to_not_be_null", name, "required"))
    options = column.options
    if "pattern" in options:
        made.append(_pattern(column.name, options["pattern"]))
    lengths = {"min_value": options.get("minLength"), "max_value": options.get("maxLength")}
    if any(value is not None for value in lengths.values()):
        rule = f"length {_interval(*lengths.values())}"
        made.append(Expectation("expect_column_value_lengths_to_be_between", name | _given(lengths), rule))
    if column.logical_type in ("integer", "number"):
        for low, high, strict in (("minimum", "maximum", False), ("exclusiveMinimum", "exclusiveMaximum", True)):
            bounds = {"min_value": options.get(low), "max_value": options.get(high)}
            if any(value is not None for value in bounds.values()):
                rule = f"{'strictly ' if strict else ''}{_interval(*bounds.values())}"
                flags = {"strict_min": strict, "strict_max": strict}
                kind = "expect_column_values_to_be_between"
                made.append(Expectation(kind, {**name, **_given(bounds), **flags}, rule))
    for quality in column.quality:
        made += _of_rule(column, quality, rows)
    return made


def _of_rule(column: Column, rule: Mapping[str, Any], rows: int) -> list[Expectation]:
    name = {"column": column.name}
    if rule.get("type") == "custom":
        return [_custom(rule, name)]
    arguments = rule.get("arguments") or {}
    allowed = allowed_rows(rule, rows)
    if rule["metric"] == "nullValues":
        return [Expectation("expect_column_values_to_not_be_null", name, "not null", allowed)]
    if rule["metric"] == "duplicateValues":
        return [Expectation("expect_column_values_to_be_unique", name, "unique")]
    if rule["metric"] == "missingValues":
        values = arguments["missingValues"]
        present = [value for value in values if value is not None]
        made = [Expectation("expect_column_values_to_not_be_null", name, "not missing")] if None in values else []
        if present:
            kind = "expect_column_values_to_not_be_in_set"
            made.append(Expectation(kind, {**name, "value_set": present}, f"not one of {present}"))
        return made
    if "pattern" in arguments:
        return [_pattern(column.name, arguments["pattern"], allowed)]
    values = arguments["validValues"]
    return [
        Expectation("expect_column_values_to_be_in_set", {**name, "value_set": values}, f"one of {values}", allowed)
    ]


def _pattern(column: str, pattern: str, allowed: int = 0) -> Expectation:
    arguments = {"column": column, "regex": ecma_pattern(pattern)}
    return Expectation("expect_column_values_to_match_regex", arguments, f"pattern {pattern}", allowed)


def _custom(rule: Mapping[str, Any], column: Mapping[str, Any]) -> Expectation:
    kind, arguments = custom_expectation(rule)
    text = str(rule.get("name") or kind.removeprefix("expect_").replace("_", " "))
    return Expectation(kind, {**column, **arguments}, text)


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _interval(low: Any, high: Any) -> str:
    if low is not None and high is not None:
        return f"between {low} and {high}"
    return f"at least {low}" if high is None else f"at most {high}"


def evaluate(frames: Sequence[Frame], docs: Path | None) -> tuple[dict[str, int], dict[str, list[Broken]]]:
    """Evaluate every table's rules with Great Expectations; write Data Docs (static HTML) below ``docs``.

    Returns:
        Per table, the number of expectations evaluated and those that did not hold.

    Raises:
        UsageError: an expectation of the contract does not exist, or cannot be evaluated on these columns.
    """
    gx = _great_expectations()
    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False}
    source = context.data_sources.add_pandas("contract")
    counts: dict[str, int] = {}
    broken: dict[str, list[Broken]] = {}
    for frame in frames:
        name = frame.table.name
        rules = expectations(frame.table, len(frame.positions))
        suite = gx.ExpectationSuite(name=name)
        suite = context.suites.add(suite)
        for number, rule in enumerate(rules):
            suite.add_expectation(_gx_expectation(gx, rule, frame, number))
        batch = source.add_dataframe_asset(name).add_batch_definition_whole_dataframe("all rows")
        definition = gx.ValidationDefinition(name=name, data=batch, suite=suite)
        checkpoint = gx.Checkpoint(
            name=name,
            validation_definitions=[context.validation_definitions.add(definition)],
            result_format={"result_format": "COMPLETE"},
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pandas warns about groups in patterns
            outcome = context.checkpoints.add(checkpoint).run(batch_parameters={"dataframe": _pandas(frame)})
        counts[name] = len(rules)
        broken[name] = []
        for result in next(iter(outcome.run_results.values())).results:
            rule = rules[result.expectation_config.meta["rule"]]
            if cause := _exception(result.exception_info or {}):
                where = f"table {name}, {rule.rule}"
                raise UsageError(f"{rule.kind} cannot be evaluated: {cause}", where=where, fix="correct the rule")
            if not result.success:
                indexes = tuple(int(index) for index in result.result.get("unexpected_index_list") or ())
                broken[name].append(Broken(rule, indexes, result.result.get("observed_value")))
    if docs is not None:
        _write_docs(context, docs)
    return counts, broken


def _exception(info: Mapping[str, Any]) -> str | None:
    """What went wrong inside Great Expectations: one entry, or one per metric."""
    entries = [info] if "raised_exception" in info else [entry for entry in info.values() if isinstance(entry, Mapping)]
    failed = [str(entry.get("exception_message")).strip() for entry in entries if entry.get("raised_exception")]
    return failed[0] if failed else None


def _gx_expectation(gx: Any, rule: Expectation, frame: Frame, number: int) -> Any:
    from great_expectations.exceptions import ExpectationNotFoundError
    from great_expectations.expectations.registry import get_expectation_impl

    arguments = dict(rule.arguments)
    if rule.allowed:
        column = frame.columns[str(rule.column)]
        judged = len(column) if rule.kind.endswith("not_be_null") else sum(value is not None for value in column)
        arguments["mostly"] = max(0.0, 1 - (rule.allowed + 0.5) / judged) if judged else 0.0
    try:
        return get_expectation_impl(rule.kind)(**arguments, meta={"rule": number})
    except ExpectationNotFoundError:
        fix = "see greatexpectations.io/expectations"
        raise UsageError(f"there is no {rule.kind}", where=f"table {frame.table.name}", fix=fix) from None
    except (ValueError, TypeError) as error:
        what = f"{rule.kind} has wrong arguments: {error}"
        raise UsageError(what, where=f"table {frame.table.name}", fix="correct its kwargs") from None


def _great_expectations() -> Any:
    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")  # must be set before the first import
    import great_expectations

    return great_expectations


def _pandas(frame: Frame) -> Any:
    import pandas as pd

    columns = {name: pd.Series(list(values), dtype=object) for name, values in frame.columns.items()}
    return pd.DataFrame(columns).set_axis(list(frame.positions))


def _write_docs(context: Any, docs: Path) -> None:
    docs.mkdir(parents=True, exist_ok=True)
    site = {
        "class_name": "SiteBuilder",
        "store_backend": {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(docs.resolve())},
        "site_index_builder": {"class_name": "DefaultSiteIndexBuilder"},
    }
    context.add_data_docs_site(site_name="contract", site_config=site)
    context.build_data_docs(site_names=["contract"])
