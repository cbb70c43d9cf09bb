from __future__ import annotations

import pytest
from pydantic import ValidationError

from data_contracts.config import DataConfig, template_columns
from infra.errors import UsageError
from tests.data_contracts.samples import column, load

TASKS = {"table": "invoices", "id": "id", "prompt": "Invoice {id}: {lines}", "reference": ["total"], "group": ["lines"]}
MADE = {"table": "made", "task": "id", "source": "source", "messages": "messages"}


def config(**changes):
    values = {"tasks": {**TASKS, **changes}, "demonstrations": MADE, "splits": {"dev": 1, "test": 1}}
    return DataConfig.model_validate(values)


@pytest.mark.parametrize(
    "prompt", ["{a.__class__}", "{a[0]}", "{a!r}", "{a:>10}", "{}", "{0}", "{a b}", "{a", "a}", ""]
)
def test_only_plain_columns_in_a_prompt(prompt):
    with pytest.raises(ValidationError):
        config(prompt=prompt)


def test_braces_and_columns():
    assert template_columns("{{json}} {a}, {b_2} and {a}") == ("a", "b_2", "a")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"table": "invoice"}, "data.tasks.table: the contract has no table 'invoice', did you mean 'invoices'"),
        ({"prompt": "{line}"}, "data.tasks.prompt: table 'invoices' has no column 'line', did you mean 'lines'"),
        ({"reference": ["totl"]}, "data.tasks.reference: .*did you mean 'total'"),
        ({"group": ["supplier"]}, "data.tasks.group: .*no column 'supplier'"),
        ({"id": "i"}, "data.tasks.id"),
    ],
)
def test_columns_must_be_in_the_contract(tmp_path, changes, words):
    invoices = {"name": "invoices", "properties": [column("id"), column("lines"), column("total", "integer")]}
    made = {"name": "made", "properties": [column("id"), column("source"), column("messages", "array")]}
    contract = load(tmp_path, invoices, made)
    config().check(contract)
    with pytest.raises(UsageError, match=words) as caught:
        config(**changes).check(contract)
    assert caught.value.fix
    values = {"tasks": TASKS, "demonstrations": {**MADE, "messages": "msgs"}, "splits": {"dev": 1, "test": 1}}
    other = DataConfig.model_validate(values)
    with pytest.raises(UsageError, match=r"data\.demonstrations\.messages"):
        other.check(contract)


def test_unknown_keys_and_empty_splits_are_refused():
    with pytest.raises(ValidationError):
        config(grup=["x"])
    with pytest.raises(ValidationError):
        DataConfig.model_validate({"tasks": TASKS, "splits": {"dev": 0, "test": 1}})
