from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from data_contracts.report import ValidationReport
from data_contracts.sources import read_table
from data_contracts.validation import validate
from infra.errors import CheckFailed, UsageError
from tests.data_contracts.samples import column, load, write_jsonl


def verdict(
    folder: Path, columns: list[dict[str, Any]], rows: list[dict[str, Any]], quality: list[dict[str, Any]] | None = None
) -> ValidationReport:
    contract = load(folder, {"name": "t", "properties": columns, "quality": quality or []})
    return validate(contract, {"t": rows})


def found(report: ValidationReport) -> list[tuple[int | None, str | None, str]]:
    return [(failure.row, failure.column, failure.rule) for failure in report.failures]


def test_good_rows_pass_and_docs_are_written(tmp_path):
    contract = load(tmp_path, {"name": "t", "properties": [column("id", primaryKey=True), column("n", "integer")]})
    report = validate(contract, {"t": [{"id": "a", "n": 1}, {"id": "b", "n": None}]}, tmp_path / "docs")
    assert report.success
    assert report.rows == {"t": 2}
    assert report.expectations == {"t": 4}
    assert report.failures == ()
    report.raise_on_failure()
    assert (
        "expect" in (tmp_path / "docs" / "index.html").read_text().lower()
        or (tmp_path / "docs" / "index.html").exists()
    )
    pages = list((tmp_path / "docs" / "validations").rglob("*.html"))
    assert len(pages) == 1
    assert "Succeeded" in pages[0].read_text()


def test_the_docs_of_a_type_failure_do_not_look_green(tmp_path):
    contract = load(tmp_path, {"name": "t", "properties": [column("n", "integer")]})
    assert not validate(contract, {"t": [{"n": "x"}]}, tmp_path / "docs").success
    page = next((tmp_path / "docs" / "validations").rglob("*.html")).read_text()
    assert "Failed" in page


def test_no_rows_is_a_failure(tmp_path):  # DC-01
    report = verdict(tmp_path, [column("a", required=True), column("b", unique=True)], [])
    assert not report.success
    assert found(report) == [(None, None, "row_count: at least 1 row")]
    assert report.failures[0].value == "0"
    json.loads(json.dumps(report.payload(), allow_nan=False))
    with pytest.raises(CheckFailed, match="row_count: at least 1 row, value 0") as caught:
        report.raise_on_failure()
    assert caught.value.exit_code == 1


def test_compound_key(tmp_path):  # DC-04
    rows = [{"tenant": t, "case": c} for t, c in (("a", 1), ("a", 1), ("b", 1), ("a", 2), ("7", 7))]
    columns = [column("tenant", primaryKey=True, primaryKeyPosition=1)]
    columns.append(column("case", "integer", primaryKey=True, primaryKeyPosition=2))
    report = verdict(tmp_path, columns, rows)
    rule = "unique as a key: tenant, case"
    assert found(report) == [(1, "tenant, case", rule), (2, "tenant, case", rule)]
    assert report.failures[0].value == "('a', 1)"


def test_nothing_is_coerced(tmp_path):  # DC-09
    columns = [column("max_turns", "integer"), column("domain"), column("n_samples", "integer")]
    report = verdict(tmp_path, columns, [{"max_turns": 3.7, "domain": True, "n_samples": "4"}])
    assert [(failure.column, failure.value) for failure in report.failures] == [
        ("max_turns", "3.7"),
        ("domain", "True"),
        ("n_samples", "'4'"),
    ]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("integer", True),
        ("integer", 3.0),
        ("number", float("nan")),
        ("number", float("inf")),
        ("number", True),
        ("number", "1"),
        ("boolean", 1),
        ("string", 1),
        ("string", "\ud800"),
        ("date", "2026-02-30"),
        ("timestamp", "yesterday"),
        ("time", "25:00"),
        ("object", [1]),
        ("object", {"a": float("nan")}),
        ("object", {"a": {1, 2}}),
        ("array", {"a": 1}),
        ("array", "[1"),
    ],
)
def test_wrong_types(tmp_path, kind, value):
    report = verdict(tmp_path, [column("a", kind), column("b")], [{"a": None, "b": "x"}, {"a": value, "b": "y"}])
    assert [(failure.row, failure.column) for failure in report.failures] == [(2, "a")]
    assert report.failures[0].rule.startswith(f"{kind}: ")
    json.dumps(report.payload(), allow_nan=False).encode()


@pytest.mark.parametrize(
    ("kind", "options", "good", "bad"),
    [
        ("string", {"pattern": "^[0-9]{4}$"}, ["0012"], ["12", "1234\n", "x1234"]),
        ("string", {"minLength": 2, "maxLength": 3}, ["ab", "abc"], ["a", "abcd"]),
        ("string", {"format": "email"}, ["a@b.c"], ["ab.c"]),
        ("string", {"format": "uuid"}, ["12345678-1234-5678-1234-567812345678"], ["1234"]),
        ("integer", {"minimum": 1, "maximum": 3}, [1, 3], [0, 4]),
        ("integer", {"exclusiveMinimum": 1, "exclusiveMaximum": 4}, [2, 3], [1, 4]),
        ("integer", {"multipleOf": 5}, [0, 10], [3]),
        ("integer", {"format": "u8"}, [0, 255], [-1, 256]),
        ("number", {"minimum": 0.5}, [0.5, 1], [0.4]),
        ("date", {"minimum": "2026-01-01"}, ["2026-01-01"], ["2025-12-31"]),
        ("timestamp", {"timezone": True}, ["2026-01-01T00:00:00+00:00"], ["2026-01-01T00:00:00"]),
        ("timestamp", {"maximum": "2026-01-01T00:00:00"}, ["2025-01-01T00:00:00"], ["2026-02-01T00:00:00"]),
        ("array", {"minItems": 1, "uniqueItems": True}, [[1, 2]], [[], [1, 1]]),
        ("object", {"required": ["a"], "maxProperties": 2}, [{"a": 1}], [{"b": 1}, {"a": 1, "b": 2, "c": 3}]),
    ],
)
def test_options(tmp_path, kind, options, good, bad):
    rows = [{"a": value} for value in (*good, *bad, None)]
    report = verdict(tmp_path, [column("a", kind, logicalTypeOptions=options)], rows)
    assert [failure.row for failure in report.failures] == list(range(len(good) + 1, len(good) + len(bad) + 1))


def test_nested_values(tmp_path):
    item = {"logicalType": "object", "properties": [column("name", required=True), column("n", "integer")]}
    rows = [
        {"a": [{"name": "x", "n": 1}]},
        {"a": [{"name": "x"}, {"n": 2}]},
        {"a": [{"name": "x", "other": 1}]},
        {"a": [3]},
    ]
    report = verdict(tmp_path, [column("a", "array", items=item)], rows)
    assert [failure.row for failure in report.failures] == [2, 3, 4]
    assert "1: name: Field required" in report.failures[0].rule


def test_lists_several_rows_with_everything_needed_to_find_them(tmp_path):
    columns = [column("id", primaryKey=True), column("po", required=True, logicalTypeOptions={"pattern": "^[0-9]{4}$"})]
    rows = [{"id": str(i), "po": "1234"} for i in range(50)]
    for index in range(10, 40):
        rows[index]["po"] = f"bad{index}"
    rows[45]["po"] = None
    rows[46]["id"] = "0"
    report = verdict(tmp_path, columns, rows)
    assert report.failure_count == 33
    with pytest.raises(CheckFailed) as caught:
        report.raise_on_failure()
    text = str(caught.value)
    assert "in 33 places" in text
    assert "table t, row 1, column id: unique, value '0'" in text
    assert "table t, row 11, column po: pattern ^[0-9]{4}$, value 'bad10'" in text
    assert "… and 13 more" in text
    assert (46, "po", "required") in found(report)
    assert text.count("table t, row") == 20


def test_only_so_many_failures_are_kept_but_all_are_counted(tmp_path):
    report = verdict(tmp_path, [column("n", "integer")], [{"n": "x"}] * 3000)
    assert report.failure_count == 3000
    assert len(report.failures) == 1000


def test_columns_missing_from_or_unknown_to_the_contract(tmp_path):
    rows = [{"a": "x", "anwser": 1}, {"a": "y", "anwser": 2}]
    report = verdict(tmp_path, [column("a"), column("answer", "integer", required=True)], rows)
    assert (None, "anwser", "not in the contract (2 rows have it)") in found(report)
    assert {(1, "answer", "required"), (2, "answer", "required")} <= set(found(report))


def test_duplicate_keys_in_json_text(tmp_path):  # DC-11
    report = verdict(tmp_path, [column("a", "object")], [{"a": {"k": 1}}, {"a": '{"k":1,"k":2}'}])
    assert found(report) == [(2, "a", "object: duplicate key 'k'")]


def test_rejected_lines_are_in_the_report(tmp_path):  # DC-11
    contract = load(tmp_path, {"name": "t", "properties": [column("id", "integer")]})
    (tmp_path / "t.jsonl").write_text('{"id":1}\n{"id":2,"id":3}\n{"id":4}\n{"id":"x"}\n')
    report = validate(contract, {"t": read_table(contract, "t", tmp_path, {})})
    assert report.rejected == {"t": 1}
    assert report.rows == {"t": 3}
    assert [(failure.row, failure.rule.split(":")[0]) for failure in report.failures] == [
        (2, "duplicate key 'id'"),
        (4, "integer"),
    ]


def test_relationships(tmp_path):
    child = {"name": "child", "properties": [column("parent", relationships=[{"to": "parent.id"}])]}
    contract = load(tmp_path, {"name": "parent", "properties": [column("id")]}, child)
    write_jsonl(tmp_path / "parent.jsonl", [{"id": "a"}])
    write_jsonl(tmp_path / "child.jsonl", [{"parent": "a"}, {"parent": "b"}, {"parent": None}])
    report = validate(contract, {name: read_table(contract, name, tmp_path, {}) for name in contract.tables})
    assert [str(failure) for failure in report.failures] == [
        "table child, row 2, column parent: must be in parent.id, value 'b'"
    ]


@pytest.mark.parametrize(
    ("rule", "values", "rows"),
    [
        ({"metric": "invalidValues", "arguments": {"validValues": ["a", "b"]}, "mustBe": 0}, ["a", "b", "c"], [3]),
        ({"metric": "invalidValues", "arguments": {"pattern": "^(?=a)."}, "mustBe": 0}, ["a", "b"], [2]),
        (
            {"metric": "missingValues", "arguments": {"missingValues": [None, "N/A"]}, "mustBe": 0},
            ["a", None, "N/A"],
            [2, 3],
        ),
        ({"metric": "nullValues", "mustBeLessOrEqualTo": 1}, ["a", None, "b"], []),
        ({"metric": "nullValues", "mustBeLessThan": 2}, ["a", None, None], [2, 3]),
        ({"metric": "nullValues", "mustBeLessOrEqualTo": 50, "unit": "percent"}, ["a", None], []),
        ({"metric": "nullValues", "mustBeLessThan": 50, "unit": "percent"}, ["a", None], [2]),
        (
            {"metric": "invalidValues", "arguments": {"validValues": ["a"]}, "mustBeLessOrEqualTo": 1},
            ["a", "b", None],
            [],
        ),
        ({"metric": "duplicateValues", "mustBe": 0}, ["a", "b", "a", None, None], [1, 3]),
        (
            {
                "type": "custom",
                "engine": "great-expectations",
                "implementation": {"type": "expect_column_values_to_be_in_set", "kwargs": {"value_set": ["a"]}},
            },
            ["a", "b"],
            [2],
        ),
        (
            {
                "type": "custom",
                "engine": "greatExpectations",
                "implementation": "type: expect_column_value_lengths_to_equal\nkwargs: {value: 1}",
            },
            ["a", "bb"],
            [2],
        ),
    ],
)
def test_quality_rules_of_a_column(tmp_path, rule, values, rows):
    report = verdict(
        tmp_path, [column("a", quality=[rule]), column("n", "integer")], [{"a": v, "n": 1} for v in values]
    )
    assert [failure.row for failure in report.failures] == rows


@pytest.mark.parametrize(
    ("rule", "good"),
    [
        ({"metric": "rowCount", "mustBe": 3}, True),
        ({"metric": "rowCount", "mustBeGreaterThan": 3}, False),
        ({"metric": "rowCount", "mustBeGreaterOrEqualTo": 3}, True),
        ({"metric": "rowCount", "mustBeLessThan": 3}, False),
        ({"metric": "rowCount", "mustBeBetween": [1, 2]}, False),
        ({"metric": "duplicateValues", "arguments": {"properties": ["a", "b"]}, "mustBe": 0}, False),
        ({"metric": "duplicateValues", "arguments": {"properties": ["c"]}, "mustBe": 0}, True),
    ],
)
def test_quality_rules_of_a_table(tmp_path, rule, good):
    rows = [{"a": "x", "b": "y", "c": "1"}, {"a": "x", "b": "y", "c": "2"}, {"a": "y", "b": "x", "c": "3"}]
    assert verdict(tmp_path, [column("a"), column("b"), column("c")], rows, [rule]).success is good


@pytest.mark.parametrize(
    ("implementation", "words"),
    [
        ({"type": "expect_nothing_at_all"}, "there is no expect_nothing_at_all"),
        ({"type": "expect_column_values_to_match_regex", "kwargs": {"regx": "x"}}, "wrong arguments"),
        ({"type": "expect_column_values_to_match_regex", "kwargs": {"regex": "("}}, "cannot be evaluated"),
    ],
)
def test_custom_rules_that_cannot_be_evaluated_never_pass(tmp_path, implementation, words):
    rule = {"type": "custom", "engine": "great-expectations", "implementation": implementation}
    with pytest.raises(UsageError, match=words):
        verdict(tmp_path, [column("a", quality=[rule])], [{"a": "x"}])


def test_a_table_that_was_not_read(tmp_path):
    contract = load(tmp_path, {"name": "t", "properties": [column("a")]}, {"name": "u", "properties": [column("a")]})
    with pytest.raises(UsageError, match="table 'u' was not read"):
        validate(contract, {"t": [{"a": "x"}]})


def test_report_survives_json(tmp_path):
    report = verdict(tmp_path, [column("n", "number")], [{"n": float("nan")}, {"n": 1}])
    assert ValidationReport.model_validate_json(report.model_dump_json()) == report


def test_importing_the_room_imports_nothing_heavy():
    rooms = ("config", "contract", "sources", "validation", "snapshot")
    heavy = ("great_expectations", "pandas", "pyarrow", "datacontract", "sqlalchemy", "torch")
    imports = "; ".join(f"import data_contracts.{room}" for room in rooms)
    code = f"import sys; {imports}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
