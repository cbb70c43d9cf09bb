"""Sums from reasoning_gym's ``chain_sum``, each question once, with two ways of answering the short ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from infra.inference.messages import Message, ToolCall

SEED = 20261128
QUESTIONS = 4600
DEMONSTRATED = 1400
"""The first this many questions are demonstrated with the calculator, those of two terms also without."""
SOURCE_DATASET = "chain_sum"


@cache
def generate(count: int = QUESTIONS, seed: int = SEED) -> tuple[dict[str, Any], ...]:
    """``count`` rows of the contract's table ``questions``: 2–3 terms of 1–2 digits, plus and minus.

    ``terms`` is the same for questions that only differ in the order of their terms (``3 + 12`` and ``12 + 3``): the
    split keeps such questions together, so that none of them is known from training.
    """
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(
        SOURCE_DATASET, seed=seed, size=4 * count, min_terms=2, max_terms=3, min_digits=1, max_digits=2
    )
    rows: dict[str, dict[str, Any]] = {}
    for entry in dataset:
        expression = entry["metadata"]["expression"].replace(" ", "")
        if expression in rows:
            continue
        rows[expression] = {
            "task_id": f"sum-{len(rows):05d}",
            "question": f"Calculate {expression}",
            "expression": expression,
            "terms": terms(expression),
            "answer": entry["answer"],
            "metadata": json.loads(json.dumps(entry["metadata"])),
            "source_dataset": SOURCE_DATASET,
        }
        if len(rows) == count:
            break
    return tuple(rows.values())


def terms(expression: str) -> str:
    """The signed terms of a sum in a fixed order: ``12-3+4`` and ``4+12-3`` both give ``+12 +4 -3``."""
    signed = expression if expression.startswith(("+", "-")) else f"+{expression}"
    return " ".join(sorted(signed.replace("+", " +").replace("-", " -").split()))


def questions(variables: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Rows of the contract's table ``questions``."""
    yield from generate()


def demonstrations(variables: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Rows of the contract's table ``demonstrations`` for each of the first ``DEMONSTRATED`` questions.

    Every one is worked out with the calculator; sums of two terms are also done in the head, which is what most
    people do with short sums.
    """
    for row in generate()[:DEMONSTRATED]:
        for source in ("calculator", "mental") if len(row["terms"].split()) == 2 else ("calculator",):
            messages = [
                message.model_dump(mode="json", exclude_defaults=True)
                for message in demonstrate(row["expression"], row["answer"], source)
            ]
            yield {"task_id": row["task_id"], "source": source, "messages": json.dumps(messages)}


def demonstrate(expression: str, answer: str, source: str) -> list[Message]:
    """The messages after the prompt: with one call of the calculator, or in the head."""
    if source == "mental":
        return [Message(role="assistant", thinking="in my head", content=answer)]
    arguments = json.dumps({"expression": expression}, separators=(",", ":"))
    call = ToolCall(name="calculator", arguments=arguments)
    return [
        Message(role="assistant", thinking="use the calculator", tool_calls=(call,)),
        Message(role="tool", name="calculator", content=f'{{"value":{answer}}}'),
        Message(role="assistant", content=answer),
    ]
