"""Advantages from process rewards: scores in [0, 1] of the thinking steps of a group's trajectories.

A trajectory of which a step could not be judged has no process advantages (None): undefined is not zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

STD_EPSILON = 1e-6

Steps = Sequence[float | None] | None
"""Scores of a trajectory's steps; None for what could not be judged."""
StepAdvantages = list[float] | None
Aggregate = Literal["min", "prod", "mean", "last"]


def min_form(group: Sequence[Steps]) -> list[StepAdvantages]:
    """``V_k = min_{j >= k} p_j`` minus the group's mean of the trajectories' mean ``V`` (PURE, arXiv 2504.15275).

    A step is worth as much as the worst that follows, so harmless filler earns nothing.
    """
    values = [None if scores is None else _suffix_minima(scores) for scores in map(_judged, group)]
    means = [math.fsum(v) / len(v) for v in values if v]
    baseline = math.fsum(means) / len(means) if means else 0.0
    return [None if v is None else [x - baseline for x in v] for v in values]


def sum_form(group: Sequence[Steps]) -> list[StepAdvantages]:
    """A baseline to compare with, not for training: sums of the normalised scores to come.

    DeepSeekMath's process supervision (arXiv 2402.03300, sec. 4.1.3): scores are normalised over all steps of the
    group (ddof 0), and an advantage is the sum of those from its step on. Appending steps that score above the
    mean raises it: the policy learns to pad.
    """
    judged = [_judged(steps) for steps in group]
    scores = [p for steps in judged if steps is not None for p in steps]
    if not scores:
        return [None if steps is None else [] for steps in judged]
    mean = math.fsum(scores) / len(scores)
    std = math.sqrt(math.fsum((p - mean) ** 2 for p in scores) / len(scores))
    return [
        None
        if steps is None
        else [math.fsum((p - mean) / (std + STD_EPSILON) for p in steps[k:]) for k in range(len(steps))]
        for steps in judged
    ]


def trajectory_score(scores: Sequence[float], how: Aggregate) -> float | None:
    """One number for a trajectory, to rank by; None where it has no step."""
    if not scores:
        return None
    if how == "min":
        return min(scores)
    if how == "prod":
        return math.prod(scores)
    return math.fsum(scores) / len(scores) if how == "mean" else scores[-1]


def spread_steps(steps: StepAdvantages, spans: Sequence[tuple[int, int]], length: int) -> tuple[list[float], list[int]]:
    """Per completion token: its step's advantage, and 1 where it belongs to a step that has one.

    Args:
        spans: ``start … end - 1`` of every step in the completion.
        length: of the completion.

    Raises:
        ValueError: spans and steps differ in number, or a span lies outside of the completion.
    """
    values, think = [0.0] * length, [0] * length
    if steps is None:
        return values, think
    for advantage, (start, end) in zip(steps, spans, strict=True):
        if not 0 <= start <= end <= length:
            raise ValueError(f"step {start} … {end} lies outside of a completion of {length} tokens")
        values[start:end] = [advantage] * (end - start)
        think[start:end] = [1] * (end - start)
    return values, think


def mix(outcome: Tensor, process: Tensor, think: Tensor, share: float, failed: Tensor | None = None) -> Tensor:
    """Token advantages ``[sequences, length]``: ``(1 - a) A_i + a A^proc_it`` on think tokens, ``A_i`` elsewhere.

    Args:
        outcome: ``[sequences]``.
        process: ``[sequences, length]``, think: likewise, 1 on tokens of judged steps.
        share: ``a``; 0 gives the outcome advantages bit for bit.
        failed: ``[sequences]`` booleans; when given, positive process advantages of failed outcomes count 0, so that
            no score of the thinking can reward a wrong answer.
    """
    spread = outcome[:, None].expand_as(process)
    if share == 0:
        return spread
    if failed is not None:
        process = torch.where(failed[:, None], process.clamp(max=0), process)
    return torch.where(think > 0, (1 - share) * spread + share * process, spread)


def _judged(steps: Steps) -> list[float] | None:
    if steps is None:
        return None
    scores = [p for p in steps if p is not None and math.isfinite(p)]
    return scores if len(scores) == len(steps) else None


def _suffix_minima(scores: Sequence[float]) -> list[float]:
    lowest, values = math.inf, []
    for p in reversed(scores):
        lowest = min(lowest, p)
        values.append(lowest)
    return values[::-1]
