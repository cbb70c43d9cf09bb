"""The score that reasoning_gym itself gives."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from domain_rewards.episode import Episode
from domain_rewards.verifiers.base import verifier


@verifier("score_answer")
def score_answer(episode: Episode) -> float:
    """``score_answer`` of the question's own dataset, for the final answer; 0 without one."""
    reference = episode.task.reference
    entry = {
        "question": episode.task.prompt,
        "answer": reference["answer"],
        "metadata": reference["metadata"],
    }
    return min(1.0, max(0.0, scorer(reference["source_dataset"])(episode.answer, entry)))


@cache
def scorer(dataset: str) -> Callable[[str | None, dict[str, Any]], float]:
    """The scoring function of a reasoning_gym dataset (importing the package takes seconds, hence here)."""
    import reasoning_gym

    score: Callable[[str | None, dict[str, Any]], float] = reasoning_gym.get_score_answer_fn(dataset)
    return score
