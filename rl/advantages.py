"""Group-relative advantages; what could not be judged stays out of every mean."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from rl.objectives.config import Baseline

STD_EPSILON = 1e-6


@dataclass(frozen=True)
class Advantages:
    """Per episode, in the order of the rewards.

    ``values`` are 0 where ``keep`` is False: unjudged episodes and groups without variance. ``rms`` is the root
    mean square of the advantages in the episode's group. ``constant_groups`` counts groups in which all judged
    rewards are equal, ``unjudged`` the episodes without a reward.
    """

    values: list[float]
    rms: list[float]
    keep: list[bool]
    groups: int
    constant_groups: int
    unjudged: int


def group_advantages(
    rewards: Sequence[float | None],
    group_size: int,
    normalise_std: bool,
    baseline: Baseline = "mean",
    ddof: Literal[0, 1] = 1,
) -> Advantages:
    """:func:`advantages_by_group` of groups of ``group_size`` that stand one after the other.

    Raises:
        ValueError: the number of rewards is not a multiple of ``group_size``.
    """
    if len(rewards) % group_size:
        raise ValueError(f"{len(rewards)} rewards do not form groups of {group_size}")
    groups = [index // group_size for index in range(len(rewards))]
    return advantages_by_group(rewards, groups, normalise_std, baseline, ddof)


def advantages_by_group(
    rewards: Sequence[float | None],
    groups: Sequence[Hashable],
    normalise_std: bool,
    baseline: Baseline = "mean",
    ddof: Literal[0, 1] = 1,
) -> Advantages:
    """``A_i = R_i - b``, divided by the group's standard deviation if asked.

    Args:
        rewards: None (or NaN) = could not be judged.
        groups: what every episode belongs to (its prompt), in any order.
        baseline: ``mean`` of the group (GRPO, arXiv 2402.03300; without the deviation Dr. GRPO, arXiv 2503.20783),
            or ``leave_one_out``, the mean of the others (RLOO, arXiv 2402.14740): ``G / (G - 1)`` times as large.
        ddof: of the standard deviation; the deviation has ``STD_EPSILON`` added.
    """
    members: dict[Hashable, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    values, rms, keep = [0.0] * len(rewards), [0.0] * len(rewards), [False] * len(rewards)
    constant = unjudged = 0
    for everyone in members.values():
        judged = [i for i in everyone if _judged(rewards[i])]
        unjudged += len(everyone) - len(judged)
        scores = [float(rewards[i] or 0.0) for i in judged]
        if len(scores) < 2 or max(scores) == min(scores):
            constant += 1
            continue
        centred = _centred(scores, normalise_std, baseline, ddof)
        group_rms = math.sqrt(math.fsum(c * c for c in centred) / len(centred))
        for i, value in zip(judged, centred, strict=True):
            values[i], rms[i], keep[i] = value, group_rms, True
    return Advantages(values, rms, keep, len(members), constant, unjudged)


def _centred(scores: Sequence[float], normalise_std: bool, baseline: Baseline, ddof: int) -> list[float]:
    total = math.fsum(scores)
    mean = total / len(scores)
    centred = [score - mean for score in scores]
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(centred) - ddof))
    if baseline == "leave_one_out":
        centred = [score - (total - score) / (len(scores) - 1) for score in scores]
    return [c / (std + STD_EPSILON) for c in centred] if normalise_std else centred


def _judged(reward: float | None) -> bool:
    return reward is not None and math.isfinite(reward)
