"""The bundled domain invoice_approval: its data, tools and verifier."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from data_contracts.contract import DataContract
from data_contracts.records import Demonstration, Task
from data_contracts.sources import read_table
from domain_rewards.environments.base import ToolFailure
from domain_rewards.episode import Episode
from domain_rewards.plugins import resolve
from domain_rewards.runtime import DomainRuntime, load_runtime
from infra.errors import UsageError
from infra.inference.messages import Message, ToolCall
from tests.domains.support import replay

BASE = Path(__file__).parents[2] / "pipelines" / "domains" / "invoice_approval"


def function(name: str) -> Any:
    return resolve(f"database.py:{name}", BASE)


def load(database: Path) -> DomainRuntime:
    options = {"database": f"sqlite:///{database}"}
    return load_runtime("environment.py:InvoiceApproval", options, ["verifiers.py:decision_and_amount"], BASE)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    function("prepare")(folder)
    return folder


@pytest.fixture(scope="module")
def runtime(home: Path) -> DomainRuntime:
    return load(home / "data" / "invoice_approval.db")


@pytest.fixture(scope="module")
def tasks() -> dict[str, Task]:
    return {
        row["invoice_id"]: Task(
            task_id=row["invoice_id"],
            prompt=f"Invoice on purchase order {row['po_number']}: {row['lines']}",
            reference={"total": row["total"], "po_limit": row["po_limit"]},
            group_key=row["lines"],
        )
        for row in function("task_rows")(function("generate")())
    }


def test_the_sample_has_the_promised_shape(tasks: dict[str, Task]) -> None:
    assert len(tasks) == 4600
    assert len({task.prompt for task in tasks.values()}) == 4600
    approved = sum(task.reference["total"] <= task.reference["po_limit"] for task in tasks.values())
    assert 0.47 < approved / len(tasks) < 0.53
    for task in tasks.values():
        total, limit = task.reference["total"], task.reference["po_limit"]
        assert limit >= 10
        assert limit == 10 or -1 - max(20, total // 2) <= limit - total <= max(20, total // 2)


async def test_every_demonstration_replays_exactly_and_scores_one(
    home: Path, runtime: DomainRuntime, tasks: dict[str, Task]
) -> None:
    with sqlite3.connect(home / "data" / "invoice_approval.db") as connection:
        rows = connection.execute("SELECT invoice_id, source, messages FROM demonstrations").fetchall()
    assert Counter(source for _, source, _ in rows) == {"careful": 1400, "hasty": 1400}
    for invoice_id, source, text in rows:
        recorded = Demonstration(task_id=invoice_id, source=source, messages=json.loads(text))
        episode = await replay(runtime, tasks[invoice_id], recorded)
        assert episode.messages == recorded.messages
        assert (await runtime.judge(episode)).reward == 1.0
        checks = [call.name for call in episode.tool_calls].count("budget_check")
        assert checks == (source == "careful")
        assert not episode.environment.errors


def test_the_words_of_a_demonstration(tasks: dict[str, Task]) -> None:
    invoice = resolve("database.py:Invoice", BASE)("inv-00000", "4821", ((3, 45), (7, 23)), 812)
    row = next(iter(function("task_rows")([invoice])))
    assert (row["lines"], row["total"], row["po_limit"]) == ("3x45; 7x23", 296, 812)
    messages = function("demonstrate")(invoice, "careful")
    assert [message.thinking for message in messages if message.thinking] == [
        "look up the purchase order",
        "add the lines",
        "check the budget",
    ]
    assert [(call.name, call.arguments) for message in messages for call in message.tool_calls] == [
        ("purchase_order", '{"number":"4821"}'),
        ("calculator", '{"expression":"3*45+7*23"}'),
        ("budget_check", '{"amount":296}'),
    ]
    assert [message.content for message in messages if message.role == "tool"] == [
        '{"spending_limit":812}',
        '{"value":296}',
        '{"remaining":516}',
    ]
    assert messages[-1] == Message(role="assistant", content="APPROVE 296")


async def test_tools_refuse_what_is_not_there(runtime: DomainRuntime, tasks: dict[str, Task]) -> None:
    used = {task.prompt.split()[4].rstrip(":") for task in tasks.values()}
    unused = next(number for number in map("{:04d}".format, range(10_000)) if number not in used)
    environment = await runtime.open(tasks["inv-00000"])
    replies = await environment.call_all(
        [
            ToolCall(name="purchase_order", arguments=f'{{"number":"{unused}"}}'),
            ToolCall(name="purchase_order", arguments='{"number":"48\\u000021"}'),
            ToolCall(name="purchase_order", arguments='{"number":4821}'),
            ToolCall(name="budget_check", arguments='{"amount":-1}'),
            ToolCall(name="calculator", arguments='{"expression":"__import__(1)"}'),
        ]
    )
    assert [json.loads(reply.content or "")["error"] for reply in replies] == [
        "not_found",
        "invalid_argument:number",
        "type_error:number",
        "invalid_argument:amount",
        "invalid_expression",
    ]


@pytest.mark.parametrize(
    ("limit", "said", "reward"),
    [
        (296, ["APPROVE 296"], 1.0),
        (295, ["REJECT 296"], 1.0),
        (295, ["APPROVE 296"], 0.0),
        (296, ["REJECT 296"], 0.0),
        (296, ["APPROVE 297"], 0.0),
        (296, ["APPROVE 0296"], 0.0),
        (296, ["APPROVE 296 "], 0.0),
        (296, ["APPROVE 296 REJECT 296"], 0.0),
        (296, ["REJECT 296", "APPROVE 296"], 0.0),
        (296, [""], 0.0),
        (296, [], 0.0),
    ],
)
async def test_verifier(runtime: DomainRuntime, limit: int, said: list[str], reward: float) -> None:
    task = Task(task_id="x", prompt="", reference={"total": 296, "po_limit": limit}, group_key="")
    messages = tuple(Message(role="assistant", content=content, thinking="APPROVE 296") for content in said)
    environment = runtime.environment(task, runtime.options)
    assert (await runtime.judge(Episode(task, messages, True, environment))).reward == reward
    assert (await runtime.judge(Episode(task, messages, False, environment))).reward == 0.0


def test_prepare_is_idempotent_repairs_and_is_deterministic(home: Path, tmp_path: Path) -> None:
    prepare, made = function("prepare"), home / "data" / "invoice_approval.db"
    before = made.stat()
    prepare(home)
    assert made.stat() == before
    (tmp_path / "data").mkdir()
    damaged = tmp_path / "data" / "invoice_approval.db"
    for content in (b"", b"this is no database, but it is long enough to look like one" * 40):
        damaged.write_bytes(content)
        prepare(tmp_path)
        assert damaged.read_bytes() == made.read_bytes()
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["invoice_approval.db"]


async def test_a_missing_database_is_a_failure_and_is_not_created(tmp_path: Path, tasks: dict[str, Task]) -> None:
    runtime = load(tmp_path / "gone.db")
    environment = await runtime.open(tasks["inv-00000"])
    with pytest.raises(ToolFailure, match="unable to open database file"):
        await environment.call(ToolCall(name="budget_check", arguments='{"amount":1}'))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "is missing"),
        ({"database": "not a url"}, "is not a SQLAlchemy URL"),
        ({"database": "sqlite:///${SENMON_HOME}/x.db"}, "has a variable without a value"),
    ],
)
def test_options_are_checked_at_load(options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_runtime("environment.py:InvoiceApproval", options, ["verifiers.py:decision_and_amount"], BASE)


def test_episodes_do_not_share_state(runtime: DomainRuntime, tasks: dict[str, Task]) -> None:
    async def remaining(task: Task) -> int:
        environment = await runtime.open(task)
        message = await environment.call(ToolCall(name="budget_check", arguments='{"amount":0}'))
        return int(json.loads(message.content or "")["remaining"])

    async def together() -> list[int]:
        return list(await asyncio.gather(*(remaining(task) for task in list(tasks.values())[:50])))

    assert asyncio.run(together()) == [task.reference["po_limit"] for task in list(tasks.values())[:50]]


def test_the_contract_reads_what_was_generated(home: Path) -> None:
    contract = DataContract.load(BASE / "contract.yaml")
    invoices = function("generate")()
    variables = {"SENMON_HOME": str(home)}
    assert list(read_table(contract, "invoices", BASE, variables)) == list(function("task_rows")(invoices))
    demonstrations = read_table(contract, "demonstrations", BASE, variables)
    expected = {(row["invoice_id"], row["source"]): row["messages"] for row in function("demonstration_rows")(invoices)}
    assert {(row["invoice_id"], row["source"]): row["messages"] for row in demonstrations} == {
        key: json.loads(messages) for key, messages in expected.items()
    }
