"""Entropy of the policy: its value, its bonus, and the controller that keeps it off the floor."""

from __future__ import annotations

import math
from typing import TypedDict

import torch
from torch import Tensor

from infra.compute.logprobs import at_least_float32
from rl.objectives.config import EntropyConfig
from rl.objectives.terms import visible


def entropy_from_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """``-sum_j p_j log p_j`` over the last dimension, nats; logits of -inf are tokens that cannot be drawn."""
    logp = torch.log_softmax(at_least_float32(logits) / temperature, -1)
    return -(logp.exp() * torch.where(logp.isfinite(), logp, 0.0)).sum(-1)


def entropy_bonus(entropy: Tensor, mask: Tensor, weights: Tensor, coefficient: float) -> Tensor:
    """A part of the loss, ``-alpha sum_it w_it H_it``; all ``[sequences, length]``, ``weights`` the policy loss's."""
    return -coefficient * (weights * visible(entropy, mask)).sum()


class EntropyState(TypedDict):
    """What a resume needs."""

    target: float | None
    coefficient: float
    applied: float


class EntropyFloor:
    """Adaptive entropy coefficient (Skywork-OR1, arXiv 2505.22312).

    After every step: ``step`` up while the entropy is at most the target, ``step`` down above it, inside
    ``[0, largest]``; and applied only while the entropy is at most the target. The target is ``target``, or
    ``share`` times the first entropy that was measured.
    """

    def __init__(self, config: EntropyConfig) -> None:
        self.config = config
        self.target = config.target
        self.coefficient = 0.0
        self.applied = 0.0

    def update(self, entropy: float) -> float:
        """Take in a step's mean entropy; the coefficient to apply in the next one. NaN and infinity change nothing."""
        if not math.isfinite(entropy):
            return self.applied
        if self.target is None:
            self.target = self.config.share * entropy
        low = entropy <= self.target
        moved = self.coefficient + (self.config.step if low else -self.config.step)
        self.coefficient = min(max(moved, 0.0), self.config.largest)
        self.applied = self.coefficient if low else 0.0
        return self.applied

    def state_dict(self) -> EntropyState:
        """The whole state, as plain numbers."""
        return {"target": self.target, "coefficient": self.coefficient, "applied": self.applied}

    def load_state_dict(self, state: EntropyState) -> None:
        """Continue from :meth:`state_dict`, bit for bit."""
        self.target, self.coefficient, self.applied = state["target"], state["coefficient"], state["applied"]
