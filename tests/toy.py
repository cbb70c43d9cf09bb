"""A domain small enough to train in a second: double a digit, in the head or with a tool."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from data_contracts.records import Demonstration, Task
from domain_rewards.environments.base import ToolEnvironment, tool
from domain_rewards.episode import Episode
from domain_rewards.runtime import DomainRuntime
from domain_rewards.verifiers.base import verifier
from infra.compute.config import ModelConfig
from infra.inference.messages import Message, ToolCall

MODEL = ModelConfig(
    preset="tiny-moe", hidden_size=32, layers=2, heads=2, kv_heads=1, head_dim=16, expert_size=32, max_positions=64
)


class Doubling(ToolEnvironment):
    """``double`` doubles; a negative number breaks the machinery."""

    @tool
    def double(self, number: int) -> dict[str, int]:
        """Double a number."""
        if number < 0:
            raise OSError("the doubling service is down")
        return {"value": 2 * number}


@verifier("doubled")
def doubled(episode: Episode) -> float:
    """Right or wrong."""
    return float(episode.answer == episode.task.reference["answer"])


@verifier("constant")
def constant(episode: Episode) -> float:
    """The same for everybody."""
    return 1.0


@verifier("alternating")
def alternating(episode: Episode) -> float:
    """Right every other time it is asked, whatever the episode: signal for a model that cannot do anything yet."""
    return float(next(_ASKED) % 2)


_ASKED = itertools.count()


@verifier("zero")
def zero(episode: Episode) -> float:
    """Nobody is right."""
    return 0.0


@verifier("crashing")
def crashing(episode: Episode) -> float:
    """Cannot judge anything."""
    raise RuntimeError("no verdict today")


def runtime(*verifiers: Any, options: Mapping[str, Any] | None = None) -> DomainRuntime:
    return DomainRuntime(Doubling, dict(options or {}), tuple(verifiers or (doubled,)), None)


def tasks(count: int = 40) -> list[Task]:
    return [
        Task(task_id=f"t{i}", prompt=f"double {i}", reference={"answer": str(2 * i)}, group_key=str(i))
        for i in range(count)
    ]


def demonstrations(of: Sequence[Task]) -> list[Demonstration]:
    """Each task with the tool and in the head."""
    out = []
    for task in of:
        number, answer = int(task.task_id[1:]), task.reference["answer"]
        call = ToolCall(name="double", arguments=json.dumps({"number": number}, separators=(",", ":")))
        with_tool = (
            Message(role="assistant", thinking="use the tool", tool_calls=(call,)),
            Message(role="tool", name="double", content=f'{{"value":{answer}}}'),
            Message(role="assistant", content=answer),
        )
        out.append(Demonstration(task_id=task.task_id, source="tool", messages=with_tool))
        head = (Message(role="assistant", thinking="in my head", content=answer),)
        out.append(Demonstration(task_id=task.task_id, source="head", messages=head))
    return out


def ignore(figures: dict[str, float], step: int) -> None:
    """A metrics sink."""
