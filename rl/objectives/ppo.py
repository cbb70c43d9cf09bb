"""Proximal Policy Optimization (arXiv 1707.06347) with generalised advantage estimation (arXiv 1506.02438).

Time runs over policy tokens only: a tool result between two of them is neither a state to be valued nor a step to
be discounted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rl.objectives.config import PPO
from rl.objectives.grpo import grpo
from rl.objectives.terms import ObjectiveResult, PolicyTerms, visible

NO_VARIANCE = 1e-12
"""Share of the mean square below which a variance is rounding."""


@dataclass(frozen=True)
class TokenRewards:
    """``values [sequences, length]``; ``empty [sequences]`` flags sequences without a policy token."""

    values: Tensor
    empty: Tensor


@dataclass(frozen=True)
class Estimates:
    """``advantages`` and ``returns`` ``[sequences, length]``, detached, 0 where masked."""

    advantages: Tensor
    returns: Tensor


@dataclass(frozen=True)
class Moments:
    """Count, sum and sum of squares of masked values; those of parts of a batch (or of ranks) add up with ``+``."""

    count: int
    total: float
    squares: float

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.count + other.count, self.total + other.total, self.squares + other.squares)


@dataclass(frozen=True)
class ValueResult:
    """``loss`` is a scalar with gradient; ``clipped [sequences, length]``: tokens whose gradient the clip removed."""

    loss: Tensor
    clipped: Tensor


@dataclass(frozen=True)
class PPOResult:
    """``loss = policy.loss + value_coefficient * value.loss``."""

    loss: Tensor
    policy: ObjectiveResult
    value: ValueResult


def outcome_rewards(rewards: Tensor, mask: Tensor) -> TokenRewards:
    """Outcome rewards ``[sequences]`` put on each sequence's last policy token; nowhere where there is none."""
    policy = mask > 0
    still_to_come = policy.flip(-1).cumsum(-1).flip(-1)
    last = policy & (still_to_come == 1)
    return TokenRewards(torch.where(last, rewards[:, None], 0.0), ~policy.any(-1))


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Estimates:
    """``A_t = sum_l (gamma lam)^l delta_{t+l}``, ``delta_t = r_t + gamma V_{t+1} - V_t`` (eq. 11-16); V = 0 at the end.

    Args:
        rewards: per token ``[sequences, length]``.
        values: the critic's at every policy token (before it is sampled), likewise.
    """
    policy = mask > 0
    rewards, values = visible(rewards.detach(), mask), visible(values.detach(), mask)
    advantages = torch.zeros_like(values)
    next_value = following = values.new_zeros(values.shape[0])
    for t in reversed(range(values.shape[1])):
        here = policy[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        following = torch.where(here, delta + gamma * lam * following, following)
        next_value = torch.where(here, values[:, t], next_value)
        advantages[:, t] = torch.where(here, following, 0.0)
    return Estimates(advantages, advantages + values)


def moments(values: Tensor, mask: Tensor) -> Moments:
    """Moments of ``values`` over policy tokens, summed in float64."""
    kept = visible(values.detach(), mask).double()
    return Moments(int((mask > 0).sum()), float(kept.sum()), float(kept.square().sum()))


def whiten(advantages: Tensor, mask: Tensor, whole: Moments) -> Tensor:
    """``(A - mean) / std`` with the moments of the whole batch; 0 where masked, and 0 everywhere without variance."""
    if not whole.count:
        return torch.zeros_like(advantages)
    mean, square = whole.total / whole.count, whole.squares / whole.count
    variance = square - mean * mean
    if not variance > NO_VARIANCE * square:
        return torch.zeros_like(advantages)
    return visible((advantages - mean) / math.sqrt(variance), mask)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, weights: Tensor, clip: float
) -> ValueResult:
    """``1/2 sum_it w_it max((V - R)², (clip(V, V_old ± clip) - R)²)``; all ``[sequences, length]``.

    The critic moves at most ``clip`` from what it said when the advantages were made (as in OpenAI's baselines).
    """
    live, old, target = visible(values, mask), visible(old_values.detach(), mask), visible(returns.detach(), mask)
    near = torch.minimum(torch.maximum(live, old - clip), old + clip)
    free_error, near_error = (live - target).square(), (near - target).square()
    loss = (weights * visible(torch.maximum(free_error, near_error), mask)).sum() / 2
    return ValueResult(loss, (near_error > free_error).detach() & (near != live).detach() & (mask > 0))


def ppo(terms: PolicyTerms, values: Tensor, old_values: Tensor, returns: Tensor, config: PPO) -> PPOResult:
    """Clipped policy loss (eq. 7, ``terms.advantages`` from :func:`gae`) and clipped value loss, weighted alike."""
    policy = grpo(terms, config.low, config.high, config.cap)
    value = value_loss(values, old_values, returns, terms.mask, terms.weights, config.value_clip)
    return PPOResult(policy.loss + config.value_coefficient * value.loss, policy, value)
