from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data_contracts.contract import DataContract, ecma_pattern
from infra.errors import UsageError
from tests.data_contracts.samples import HEAD, column, contract_text, load

GOOD = (
    HEAD
    + """\
servers:
  - server: database
    type: custom
    location: "sqlite:///x.db"
schema:
  - name: invoices
    logicalType: object
    properties:
      - name: id
        logicalType: string
        primaryKey: true
      - name: total
        logicalType: integer
        required: true
        logicalTypeOptions: {minimum: 1}
"""
)


def refused(tmp_path: Path, text: str) -> UsageError:
    path = tmp_path / "contract.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        DataContract.load(path)
    assert caught.value.exit_code == 2
    assert caught.value.fix
    return caught.value


def test_reads_tables_columns_and_keys(tmp_path):
    path = tmp_path / "contract.yaml"
    path.write_text(GOOD)
    contract = DataContract.load(path)
    table = contract.tables["invoices"]
    assert table.primary_key == ("id",)
    assert table.columns["id"].required
    assert table.columns["total"].options == {"minimum": 1}
    assert table.server == "database"
    assert contract.servers["database"].location == "sqlite:///x.db"


def test_hash_is_of_the_content(tmp_path):
    one, other, third = tmp_path / "a.yaml", tmp_path / "b.yaml", tmp_path / "c.yaml"
    one.write_text(GOOD)
    other.write_text("# a comment\n" + GOOD.replace("{minimum: 1}", "{ minimum: 1 }"))
    third.write_text(GOOD.replace("minimum: 1", "minimum: 2"))
    assert DataContract.load(one).content_hash == DataContract.load(other).content_hash
    assert DataContract.load(one).content_hash != DataContract.load(third).content_hash


def test_missing_file(tmp_path):
    with pytest.raises(UsageError) as caught:
        DataContract.load(tmp_path / "none.yaml")
    assert "none.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "at", "words"),
    [
        ("status: active", "status: active: x", "active: x", "not valid YAML"),
        ("        required: true", "        required: [true", "logicalTypeOptions", "not valid YAML"),
        ("status: active", "status: active\nstatus: draft", "status: draft", "duplicate key"),
        ("        required: true", "        requird: true", "requird", "unknown key requird|did you mean 'required'"),
        ("  - name: invoices", "  - name: invoices\n    colour: red", "colour", "unknown key colour"),
        ("status: active", "status: active\nstaus: x", "staus", "unknown key staus|did you mean 'status'"),
        (
            "    type: custom",
            "    type: custom\n    locaton: x",
            "locaton",
            "unknown key locaton|did you mean 'location'",
        ),
        ("logicalType: integer", "logicalType: int", "logicalType: int", "'int' is not one of"),
        ("required: true", "required: yes", "required: yes", "'yes' is not of type 'boolean'"),
        ("{minimum: 1}", "{minimun: 1}", "minimun", "unknown key minimun|did you mean 'minimum'"),
        ("{minimum: 1}", "{minimum: .nan}", ".nan", "cannot be used in a contract"),
        ("version: 1.0.0", "version: 1.0", "version: 1.0", "1.0 is not of type 'string'"),
        ("        logicalType: integer\n", "", "- name: total", "no logicalType"),
        ("name: total", "name: id", "- name: id", "two entries for column 'id'"),
        ("sqlite:///x.db", "x.db", "location", "needs a location"),
        ("v3.1.0", "v2.2.2", "apiVersion", "apiVersion"),
    ],
)
def test_names_line_and_key(tmp_path, old, new, at, words):
    assert old in GOOD
    text = GOOD.replace(old, new, 1)
    error = refused(tmp_path, text)
    file, _, line = error.where.rpartition(":")
    assert file == str(tmp_path / "contract.yaml")
    assert at in text.splitlines()[int(line) - 1], str(error)
    for word in words.split("|"):
        assert word in str(error)


def test_servers_that_cannot_be_read_say_what_can(tmp_path):
    server = {"server": "db", "type": "postgres", "host": "h", "port": 5432, "database": "d", "schema": "s"}
    error = refused(tmp_path, contract_text({"name": "t", "properties": [column("a")]}, servers=[server]))
    assert "cannot be read directly" in error.what
    assert "SQLAlchemy URL" in error.fix


def test_missing_key_of_the_standard(tmp_path):
    error = refused(tmp_path, GOOD.replace("status: active\n", ""))
    assert "'status' is a required property" in str(error)


def test_yaml_tags_run_nothing(tmp_path):
    refused(tmp_path, GOOD.replace("id: test", 'id: !!python/object/apply:os.system ["touch pwned"]'))
    assert not Path("pwned").exists()


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"quality": [{"type": "sql", "query": "SELECT 1", "mustBe": 0}]}, "SQL are not checked"),
        ({"quality": [{"type": "custom", "engine": "soda", "implementation": "x"}]}, "is not run"),
        ({"quality": [{"metric": "nullValues", "mustBeGreaterThan": 3}]}, "cannot be checked with mustBeGreaterThan"),
        ({"quality": [{"metric": "nullValues", "mustBe": 3}]}, "cannot be checked with mustBe"),
        ({"quality": [{"metric": "rowCount", "mustBe": 3}]}, "not checked for a column"),
        ({"quality": [{"metric": "invalidValues", "mustBe": 0}]}, "needs one argument"),
        ({"quality": [{"metric": "invalidValues", "arguments": {"valid": [1]}, "mustBe": 0}]}, "would not be checked"),
        (
            {"quality": [{"metric": "invalidValues", "arguments": {"pattern": "("}, "mustBe": 0}]},
            "no regular expression",
        ),
        ({"quality": [{"metric": "duplicateValues", "mustBeLessThan": 9}]}, "without tolerance"),
        ({"logicalTypeOptions": {"pattern": "["}}, "no regular expression"),
        ({"logicalTypeOptions": {"format": "binary"}}, "would not be checked"),
        ({"relationships": [{"to": "other.id"}]}, "not in the contract"),
        ({"relationships": [{"to": ["t.id"]}]}, "would not be checked"),
    ],
)
def test_a_rule_that_would_not_be_checked_is_refused(tmp_path, extra: dict[str, Any], words):
    text = contract_text({"name": "t", "properties": [column("id"), column("a", **extra)]})
    assert words in str(refused(tmp_path, text))


def test_text_rules_are_documentation(tmp_path):
    rule = {"type": "text", "description": "must look nice"}
    contract = load(tmp_path, {"name": "t", "properties": [column("a", quality=[rule])], "quality": [rule]})
    assert contract.tables["t"].quality == ()
    assert contract.tables["t"].columns["a"].quality == ()


def test_custom_property_typo_and_unknown_server(tmp_path):
    table = {"name": "t", "properties": [column("a")]}
    typo = {**table, "customProperties": [{"property": "querry", "value": "SELECT 1"}]}
    assert "did you mean 'query'" in str(refused(tmp_path, contract_text(typo)))
    nowhere = {**table, "customProperties": [{"property": "server", "value": "filez"}]}
    assert "did you mean 'files'" in str(refused(tmp_path, contract_text(nowhere)))


@pytest.mark.parametrize(
    ("pattern", "text", "matches"),
    [
        ("^[0-9]{4}$", "1234", True),
        ("^[0-9]{4}$", "1234\n", False),
        (r"^\d+$", "１２", False),
        (r"^[\d-]+$", "1-2", True),
        (r"^\w+$", "é", False),
        (r"^a\$$", "a$", True),
        ("^[$]$", "$", True),
        (r"^[\]$]$", "$", True),
    ],
)
def test_patterns_mean_what_the_standard_says(pattern, text, matches):
    import re

    assert (re.search(ecma_pattern(pattern), text) is not None) is matches
