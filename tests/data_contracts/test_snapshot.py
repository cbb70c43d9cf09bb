from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from data_contracts.config import DataConfig
from data_contracts.contract import DataContract
from data_contracts.records import Snapshot
from data_contracts.report import ValidationReport
from data_contracts.snapshot import build_snapshot, load_demonstrations, load_tasks, read_manifest
from data_contracts.splits import normalise
from data_contracts.transcripts import messages_text, parse_messages, read_messages
from infra.errors import CheckFailed, UsageError
from infra.inference.messages import Message, ToolCall
from tests.data_contracts.samples import column, load

ANSWER = {"role": "assistant", "content": "ok"}
CALL = {"role": "assistant", "thinking": "look", "tool_calls": [{"name": "lookup", "arguments": '{"id":3}'}]}
RESULT = {"role": "tool", "name": "lookup", "content": '{"a": 1}'}


def a_contract(folder: Path) -> DataContract:
    tasks = {"name": "tasks", "properties": [column("id"), column("q"), column("a", "object"), column("g")]}
    made = {"name": "made", "properties": [column("id"), column("source"), column("messages", "array")]}
    return load(folder, tasks, made)


def a_config(dev: int = 2, test: int = 3, group: list[str] | None = None, salt: str = "") -> DataConfig:
    tasks = {"table": "tasks", "id": "id", "prompt": "Do {q}", "reference": ["a"], "group": group or []}
    made = {"table": "made", "task": "id", "source": "source", "messages": "messages"}
    return DataConfig.model_validate(
        {"tasks": tasks, "demonstrations": made, "splits": {"dev": dev, "test": test, "salt": salt}}
    )


def good(contract: DataContract, tables: dict[str, list[dict[str, Any]]]) -> ValidationReport:
    return ValidationReport(
        success=True,
        contract_hash=contract.content_hash,
        rows={name: len(rows) for name, rows in tables.items()},
        rejected={},
        expectations={},
        failure_count=0,
        failures=(),
    )


def some_tables(count: int = 20) -> dict[str, list[dict[str, Any]]]:
    tasks = [{"id": f"t{i:02d}", "q": f"thing {i}", "a": {"n": i}, "g": str(i // 2)} for i in range(count)]
    made = [{"id": task["id"], "source": "hand", "messages": [CALL, RESULT, ANSWER]} for task in tasks]
    return {"tasks": tasks, "made": made}


def build(folder: Path, tables: dict[str, list[dict[str, Any]]], config: DataConfig | None = None) -> Snapshot:
    contract = a_contract(folder)
    return build_snapshot("d", contract, config or a_config(), tables, good(contract, tables), folder / "snapshot")


def test_everything_comes_back(tmp_path):
    snapshot = build(tmp_path, some_tables())
    folder = tmp_path / "snapshot"
    assert {name: file.rows for name, file in snapshot.files.items()} == {
        "train": 15,
        "dev": 2,
        "test": 3,
        "demonstrations": 17,
    }
    assert read_manifest(folder) == snapshot
    assert sorted(path.name for path in tmp_path.iterdir()) == ["contract.yaml", "snapshot"]
    tasks = {split: load_tasks(folder, snapshot, split) for split in ("train", "dev", "test")}
    every = sorted((task for part in tasks.values() for task in part), key=lambda task: task.task_id)
    assert [(task.task_id, task.prompt, task.reference) for task in every] == [
        (f"t{i:02d}", f"Do thing {i}", {"a": {"n": i}}) for i in range(20)
    ]
    for split in ("train", "dev"):
        demonstrations = load_demonstrations(folder, snapshot, split)
        assert [made.task_id for made in demonstrations] == [task.task_id for task in tasks[split]]
        assert demonstrations[0].messages == (
            Message(role="assistant", thinking="look", tool_calls=(ToolCall(name="lookup", arguments='{"id":3}'),)),
            Message(role="tool", name="lookup", content='{"a": 1}'),
            Message(role="assistant", content="ok"),
        )
    assert load_demonstrations(folder, snapshot, "test") == []
    with pytest.raises(UsageError, match="no split 'dve'"):
        load_tasks(folder, snapshot, "dve")


def test_same_rows_in_any_order_give_the_same_bytes(tmp_path):
    tables = some_tables(40)
    other = {name: random.Random(1).sample(rows, len(rows)) for name, rows in tables.items()}
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    one, two = build(tmp_path / "a", tables), build(tmp_path / "b", other)
    assert one == two
    assert one.id == two.id
    assert build(tmp_path / "c", tables, a_config(salt="x")).files["test"] != one.files["test"]


def test_messages_round_trip_exactly(tmp_path):  # DC-12
    texts = ["", "a\u2028b", "日本 😀", '{"x": 1.0, "b":null}', "\x00\x1f", "<|end|>"]
    rows = some_tables(len(texts) * 3)
    for index, row in enumerate(rows["made"]):
        text = texts[index % len(texts)]
        arguments = [text, '{"id":3}', '{"id":"3","deep":{"a":[1,null]}}'][index % 3]
        call = {
            "role": "assistant",
            "content": text,
            "tool_calls": [{"name": "f", "arguments": arguments, "call_id": "c"}],
        }
        row["messages"] = [
            call,
            {"role": "tool", "content": text, "tool_call_id": "c"},
            {"role": "assistant", "content": text},
        ]
    wanted = {row["id"]: tuple(Message.model_validate(message) for message in row["messages"]) for row in rows["made"]}
    snapshot = build(tmp_path, rows)
    for split in ("train", "dev"):
        for made in load_demonstrations(tmp_path / "snapshot", snapshot, split):
            assert made.messages == wanted[made.task_id]
            stored = json.loads(messages_text(made.messages))
            assert None not in [value for message in stored for value in message.values()]
            assert parse_messages(messages_text(made.messages)) == made.messages


def test_no_duplicates_across_splits_for_any_seed(tmp_path):  # DC-14
    prompts = [
        "Reset  PIN",
        "reset pin",
        "ＲＥＳＥＴ pin",
        " reset\tpin",
        "RESET PIN ",
        *(f"task {i}" for i in range(7)),
    ]
    tables = {"tasks": [{"id": f"{i:02d}", "q": q, "a": None, "g": None} for i, q in enumerate(prompts)], "made": []}
    contract = a_contract(tmp_path)
    for seed in range(100):
        folder = tmp_path / f"s{seed}"
        config = a_config(dev=1, test=2, salt=str(seed))
        snapshot = build_snapshot("d", contract, config, tables, good(contract, tables), folder)
        assert snapshot.lineage["collapsed_duplicates"] == 4
        sides = [
            {normalise(task.prompt) for task in load_tasks(folder, snapshot, split)}
            for split in ("train", "dev", "test")
        ]
        assert len(set().union(*sides)) == sum(map(len, sides)) == 8


def test_equal_prompts_with_other_references_are_kept_and_stay_together(tmp_path):
    tables = some_tables(20)
    tables["tasks"][7]["q"] = "THING  3"
    snapshot = build(tmp_path, tables)
    assert snapshot.lineage["collapsed_duplicates"] == 0
    where = [
        split
        for split in ("train", "dev", "test")
        for task in load_tasks(tmp_path / "snapshot", snapshot, split)
        if normalise(task.prompt) == "do thing 3"
    ]
    assert len(where) == 2
    assert len(set(where)) == 1


def test_demonstrations_of_a_collapsed_task_go_to_the_kept_one(tmp_path):
    tables = some_tables(10)
    tables["tasks"].append({**tables["tasks"][4], "id": "t99", "q": "THING 4"})
    tables["made"] = [{"id": "t99", "source": "hand", "messages": [ANSWER]}] * 2
    for salt in "abcdefgh":
        folder = tmp_path / salt
        folder.mkdir()
        snapshot = build(folder, tables, a_config(dev=1, test=1, salt=salt))
        made = [one for split in ("train", "dev") for one in load_demonstrations(folder / "snapshot", snapshot, split)]
        left_out = snapshot.lineage["demonstrations_of_test_tasks_left_out"]
        assert [one.task_id for one in made] == ["t04"] * (1 - left_out)


def test_groups_stay_together_whatever_they_are_written_like(tmp_path):
    tables = some_tables(30)
    for task in tables["tasks"]:
        task["g"] = f"Group {task['g']}" if int(task["id"][1:]) % 2 else f"ｇｒｏｕｐ  {task['g']} "
    snapshot = build(tmp_path, tables, a_config(dev=4, test=6, group=["g"]))
    seen: dict[str, str] = {}
    for split in ("train", "dev", "test"):
        for task in load_tasks(tmp_path / "snapshot", snapshot, split):
            assert seen.setdefault(task.group_key, split) == split
    assert len(seen) == 15
    assert snapshot.files["test"].rows == 6


def test_a_group_that_does_not_fit_leaves_a_smaller_split_or_none(tmp_path):
    tables = some_tables(30)
    (tmp_path / "a").mkdir()
    snapshot = build(tmp_path / "a", tables, a_config(dev=3, test=5, group=["g"]))
    assert (snapshot.files["dev"].rows, snapshot.files["test"].rows) == (2, 4)
    assert snapshot.lineage["asked"] == {"dev": 3, "test": 5}
    with pytest.raises(CheckFailed, match="no task is left for dev"):
        build(tmp_path, tables, a_config(dev=1, test=6, group=["g"]))
    for task in tables["tasks"]:
        task["g"] = "all the same"
    with pytest.raises(CheckFailed, match="no task is left for dev"):
        build(tmp_path, tables, a_config(group=["g"]))


def test_too_few_tasks(tmp_path):
    with pytest.raises(CheckFailed, match="5 different tasks are too few for 2 dev and 3 test"):
        build(tmp_path, some_tables(5))
    assert not (tmp_path / "snapshot").exists()


def test_every_bad_row_is_listed(tmp_path):
    tables = some_tables()
    tables["tasks"][3]["id"] = "t02"
    tables["tasks"][5]["q"] = None
    tables["tasks"][6]["id"] = None
    with pytest.raises(CheckFailed) as caught:
        build(tmp_path, tables)
    text = str(caught.value)
    assert "in 3 places" in text
    assert "table tasks, row 4, column id: two tasks have this id, value 't02'" in text
    assert "table tasks, row 6, column q: missing; the prompt needs it" in text
    assert "table tasks, row 7, column id: missing" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["contract.yaml"]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("text", "not a list"),
        ([], "the last one must be the assistant's answer"),
        (
            [{"role": "assistant", "content": "x", "toolcalls": []}],
            "messages.0.toolcalls: Extra inputs are not permitted",
        ),
        ([{"role": "assistant", "content": 3}], "messages.0.content"),
        ([{"role": "assistant"}], "the final answer has no content"),
        ([{"role": "user", "content": "x"}, ANSWER], "role 'user'"),
        ([{"role": "robot", "content": "x"}], "messages.0.role"),
        ([{"content": "x"}], "messages.0.role: Field required"),
        ([RESULT, ANSWER], "messages.0: a tool message that answers no call"),
        ([CALL, ANSWER], "messages.1: the call of 'lookup' has no tool message"),
        ([CALL, RESULT], "the last one must be the assistant's answer"),
        ([CALL], "the last one must be the assistant's answer"),
        ([CALL, {**RESULT, "name": "other"}, ANSWER], "'other' was not called"),
        ([{**CALL, "tool_calls": [{"name": "x", "arguments": "{}", "id": "1"}]}, ANSWER], "messages.0.tool_calls.0.id"),
        ([{**CALL, "tool_calls": [{"name": "x", "arguments": {"id": 3}}]}, ANSWER], "tool_calls.0.arguments"),
    ],
)
def test_messages_that_are_not_well_formed(tmp_path, messages, words):
    with pytest.raises(ValueError, match=words.replace("(", "[(]")):
        read_messages(messages)
    tables = some_tables()
    tables["made"][4]["messages"] = messages
    with pytest.raises(CheckFailed) as caught:
        build(tmp_path, tables)
    assert "table made, row 5, column messages" in str(caught.value)


def test_demonstration_of_an_unknown_task(tmp_path):
    tables = some_tables()
    tables["made"][0]["id"] = "t98"
    with pytest.raises(CheckFailed, match="row 1, column id: there is no such task, value 't98'"):
        build(tmp_path, tables)


def test_a_report_about_other_data_is_refused(tmp_path):
    contract, tables = a_contract(tmp_path), some_tables()
    report = good(contract, tables)
    for change in ({"success": False}, {"rows": {"tasks": 1, "made": 20}}, {"contract_hash": "0"}):
        with pytest.raises(CheckFailed):
            build_snapshot("d", contract, a_config(), tables, report.model_copy(update=change), tmp_path / "snapshot")
    assert not (tmp_path / "snapshot").exists()


def test_again_gives_the_same_and_other_data_never_overwrites(tmp_path):
    first = build(tmp_path, some_tables())
    assert build(tmp_path, some_tables()) == first
    with pytest.raises(CheckFailed, match="holds something else"):
        build(tmp_path, some_tables(21))
    assert read_manifest(tmp_path / "snapshot") == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["contract.yaml", "snapshot"]


def test_many_at_once(tmp_path):
    contract, tables = a_contract(tmp_path), some_tables()
    made: list[Snapshot] = []

    def run() -> None:
        made.append(build_snapshot("d", contract, a_config(), tables, good(contract, tables), tmp_path / "snapshot"))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [made[0]] * 8
    assert len(list((tmp_path / "snapshot").iterdir())) == 5


def test_changed_and_missing_files_are_noticed(tmp_path):
    snapshot = build(tmp_path, some_tables())
    path = tmp_path / "snapshot" / "train.parquet"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(CheckFailed, match=r"train\.parquet is not the one that was written"):
        load_tasks(tmp_path / "snapshot", snapshot, "train")
    with pytest.raises(CheckFailed, match="not the one"):
        build(tmp_path, some_tables())
    assert len(load_tasks(tmp_path / "snapshot", snapshot, "dev")) == 2
    (tmp_path / "snapshot" / "demonstrations.parquet").unlink()
    with pytest.raises(CheckFailed, match="is missing"):
        load_demonstrations(tmp_path / "snapshot", snapshot, "train")


def test_a_crash_while_writing_leaves_nothing(tmp_path, monkeypatch):
    import pyarrow.parquet as pq

    write, calls = pq.write_table, []

    def failing(*args: Any, **options: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise OSError("disk full")
        write(*args, **options)

    monkeypatch.setattr(pq, "write_table", failing)
    with pytest.raises(OSError, match="disk full"):
        build(tmp_path, some_tables())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["contract.yaml"]
