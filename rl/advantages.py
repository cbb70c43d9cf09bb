"""Group-relative advantages; what could not be judged stays out of every mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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


def group_advantages(rewards: Sequence[float | None], group_size: int, normalise_std: bool) -> Advantages:
    """``A_i = R_i - mean(group)``, divided by the group's standard deviation (ddof 1) if asked.

    Args:
        rewards: groups of ``group_size`` one after the other; None (or NaN) = could not be judged.

    Raises:
        ValueError: the number of rewards is not a multiple of ``group_size``.
    """
    if len(rewards) % group_size:
        raise ValueError(f"{len(rewards)} rewards do not form groups of {group_size}")
    values, rms, keep = [0.0] * len(rewards), [0.0] * len(rewards), [False] * len(rewards)
    constant = unjudged = 0
    for start in range(0, len(rewards), group_size):
        members = [i for i in range(start, start + group_size) if _judged(rewards[i])]
        unjudged += group_size - len(members)
        scores = [float(rewards[i] or 0.0) for i in members]
        if len(scores) < 2 or max(scores) == min(scores):
            constant += 1
            continue
        mean = math.fsum(scores) / len(scores)
        centred = [score - mean for score in scores]
        if normalise_std:
            std = math.sqrt(math.fsum(c * c for c in centred) / (len(centred) - 1))
            centred = [c / (std + STD_EPSILON) for c in centred]
        group_rms = math.sqrt(math.fsum(c * c for c in centred) / len(centred))
        for i, value in zip(members, centred, strict=True):
            values[i], rms[i], keep[i] = value, group_rms, True
    return Advantages(values, rms, keep, len(rewards) // group_size, constant, unjudged)


def _judged(reward: float | None) -> bool:
    return reward is not None and math.isfinite(reward)
