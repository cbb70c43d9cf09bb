"""The bundled domain arithmetic: its data, tool and verifier."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from data_contracts.contract import DataContract
from data_contracts.records import Demonstration, Task
from data_contracts.sources import read_table
from domain_rewards.episode import Episode
from domain_rewards.plugins import resolve
from domain_rewards.runtime import DomainRuntime, load_runtime
from infra.inference.messages import Message
from tests.domains.support import replay

BASE = Path(__file__).parents[2] / "pipelines" / "domains" / "arithmetic"


@pytest.fixture(scope="module")
def runtime() -> DomainRuntime:
    return load_runtime("environment.py:Arithmetic", {}, ["verifiers.py:score_answer"], BASE)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return list(resolve("tasks.py:questions", BASE)({}))


@pytest.fixture(scope="module")
def tasks(rows: list[dict[str, Any]]) -> dict[str, Task]:
    return {
        row["task_id"]: Task(
            task_id=row["task_id"],
            prompt=row["question"],
            reference={name: row[name] for name in ("answer", "metadata", "source_dataset")},
            group_key=row["terms"],
        )
        for row in rows
    }


def test_each_question_occurs_once_and_is_the_datasets_own(rows: list[dict[str, Any]]) -> None:
    import reasoning_gym

    assert len(rows) == len({row["expression"] for row in rows}) == 4600
    seed = resolve("tasks.py:SEED", BASE)
    dataset = reasoning_gym.create_dataset(
        "chain_sum", seed=seed, size=20_000, min_terms=2, max_terms=3, min_digits=1, max_digits=2
    )
    for row in rows[::100]:
        entry = dataset[row["metadata"]["source_index"]]
        assert entry["answer"] == row["answer"]
        assert entry["question"].endswith(f"{row['metadata']['expression']} =")
        assert row["question"] == f"Calculate {row['metadata']['expression'].replace(' ', '')}"


def test_reordered_questions_share_their_terms() -> None:
    terms = resolve("tasks.py:terms", BASE)
    assert terms("12-3+4") == terms("4+12-3") == "+12 +4 -3"
    assert terms("12-3") != terms("3-12")
    assert terms("1+23") != terms("12+3")


async def test_every_demonstration_replays_exactly_and_scores_one(
    runtime: DomainRuntime, tasks: dict[str, Task]
) -> None:
    sources: Counter[str] = Counter()
    for row in resolve("tasks.py:demonstrations", BASE)({}):
        recorded = Demonstration(**{**row, "messages": json.loads(row["messages"])})
        sources[recorded.source] += 1
        episode = await replay(runtime, tasks[recorded.task_id], recorded)
        assert episode.messages == recorded.messages
        assert (await runtime.judge(episode)).reward == 1.0
        assert len(episode.tool_calls) == (recorded.source == "calculator")
        assert recorded.source == "calculator" or len(tasks[recorded.task_id].prompt.replace("-", "+").split("+")) == 2
    assert sources["calculator"] == 1400
    assert 400 < sources["mental"] < 1000, "short sums only"


@pytest.mark.parametrize(
    ("content", "finished", "reward"),
    [
        ("41", True, 1.0),
        ("41.0", True, 1.0),  # reasoning_gym tolerates trailing decimals
        ("it is 41", True, 0.25),  # and gives the share that the answer has of the text
        ("40", True, 0.0),
        ("", True, 0.0),
        ("41", False, 0.0),
    ],
)
async def test_verifier(runtime: DomainRuntime, content: str, finished: bool, reward: float) -> None:
    reference = {"answer": "41", "metadata": {}, "source_dataset": "chain_sum"}
    task = Task(task_id="x", prompt="Calculate 12+34-5", reference=reference, group_key="")
    message = Message(role="assistant", content=content, thinking="41")
    episode = Episode(task, (message,), finished, runtime.environment(task, {}))
    assert (await runtime.judge(episode)).reward == reward


async def test_an_answer_with_code_is_text_se02(runtime: DomainRuntime, tmp_path: Path) -> None:
    target = tmp_path / "touched"
    reference = {"answer": "41", "metadata": {}, "source_dataset": "chain_sum"}
    task = Task(task_id="x", prompt="Calculate 12+34-5", reference=reference, group_key="")
    for content in (f"__import__('os').system('touch {target}')", f'(lambda: open("{target}","w"))()'):
        episode = Episode(task, (Message(role="assistant", content=content),), True, runtime.environment(task, {}))
        assert (await runtime.judge(episode)).reward == 0.0
    assert not target.exists()


async def test_an_unknown_dataset_cannot_be_judged(runtime: DomainRuntime) -> None:
    reference = {"answer": "41", "metadata": {}, "source_dataset": "no_such_dataset"}
    task = Task(task_id="x", prompt="", reference=reference, group_key="")
    episode = Episode(task, (Message(role="assistant", content="41"),), True, runtime.environment(task, {}))
    verdict = await runtime.judge(episode)
    assert verdict.reward is None
    assert "no_such_dataset" in verdict.evidence["score_answer"]


def test_the_contract_reads_what_was_generated(rows: list[dict[str, Any]]) -> None:
    contract = DataContract.load(BASE / "contract.yaml")
    assert list(read_table(contract, "questions", BASE, {})) == rows
    rows = read_table(contract, "demonstrations", BASE, {})
    assert len({(row["task_id"], row["source"]) for row in rows}) == len(rows) > 1800
