"""Demonstrations as token ids: rendering, mixing sources, and where their paths part."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from data_contracts.records import Demonstration, Task
from domain_rewards.environments.base import ToolEnvironment
from infra.errors import CheckFailed
from infra.inference.renderers.base import RenderedDemonstration, Renderer


@dataclass(frozen=True)
class Example:
    """A rendered demonstration of one task by one source."""

    task_id: str
    source: str
    tokens: RenderedDemonstration


def render_examples(
    tasks: Mapping[str, Task],
    demonstrations: Sequence[Demonstration],
    environment: type[ToolEnvironment],
    renderer: Renderer,
    max_length: int,
) -> list[Example]:
    """Render every demonstration.

    Raises:
        CheckFailed: a demonstration is longer than ``max_length`` tokens, or nothing in it is trained on.
    """
    tools = environment.tools()
    examples = []
    for demonstration in demonstrations:
        task = tasks[demonstration.task_id]
        tokens = renderer.demonstration(environment.messages(task), demonstration.messages, tools)
        where = f"demonstration of task {task.task_id} by {demonstration.source}"
        length = len(tokens.prompt) + len(tokens.ids)
        if length > max_length:
            raise CheckFailed(
                f"a demonstration has {length} tokens, more than sft.max_length = {max_length}",
                where=where,
                fix="raise sft.max_length in domain.yaml or shorten the demonstration",
            )
        if not any(tokens.mask):
            raise CheckFailed(
                "a demonstration has no assistant tokens to learn from",
                where=where,
                fix="add at least one assistant message",
            )
        examples.append(Example(demonstration.task_id, demonstration.source, tokens))
    return examples


class Mixture:
    """Draws tasks uniformly and, for each, a demonstration by the weight of its source."""

    def __init__(self, examples: Sequence[Example], weights: Mapping[str, float]) -> None:
        sources = {example.source for example in examples}
        unknown = set(weights) - sources
        if unknown:
            raise CheckFailed(
                f"sft.mixture names sources without demonstrations: {', '.join(sorted(unknown))}",
                where="domain.yaml, sft.mixture",
                fix=f"use some of: {', '.join(sorted(sources)) or '(there are no demonstrations)'}",
            )
        by_task: dict[str, list[Example]] = defaultdict(list)
        for example in examples:
            if not weights or weights.get(example.source, 0) > 0:
                by_task[example.task_id].append(example)
        if not by_task:
            raise CheckFailed(
                "there is no demonstration to learn from",
                where="snapshot, demonstrations",
                fix="add demonstrations for tasks of the training split, or widen sft.mixture",
            )
        self._tasks = [by_task[task] for task in sorted(by_task)]
        self._weights = weights

    def draw(self, size: int, rng: random.Random) -> list[Example]:
        """``size`` examples of different tasks (fewer when there are fewer tasks)."""
        drawn = []
        for choices in rng.sample(self._tasks, min(size, len(self._tasks))):
            weights = [self._weights.get(example.source, 1.0) if self._weights else 1.0 for example in choices]
            drawn.append(rng.choices(choices, weights)[0])
        return drawn


def branch_points(examples: Sequence[Example], source: str) -> list[tuple[Example, int | None]]:
    """For each example of ``source``: the first completion position in which it differs from every other source.

    None when no other source demonstrates the same task.
    """
    others: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for example in examples:
        if example.source != source:
            others[example.task_id].append(example.tokens.ids)
    points: list[tuple[Example, int | None]] = []
    for example in examples:
        if example.source == source:
            shared = [_common_prefix(example.tokens.ids, ids) for ids in others[example.task_id]]
            points.append((example, max(shared) if shared else None))
    return points


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for position, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return position
    return min(len(a), len(b))
