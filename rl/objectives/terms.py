"""What every policy objective takes in and gives back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""|log ratio| of a token above which it is clamped, so that no ``exp`` overflows in float32 (e^20 = 4.9e8)."""


@dataclass(frozen=True)
class PolicyTerms:
    """What the objective looks at; all ``[sequences, length]``.

    ``logprobs`` carry gradient, ``old_logprobs`` do not; ``mask`` is 1 on tokens sampled by the policy.
    ``advantages`` may differ per token (process rewards); ``weights`` come from ``aggregation.token_weights``;
    ``correction`` are detached trainer-rollout weights (``correction.correct``), or None.

    Where ``mask`` is 0 the other values may be anything, NaN included: nothing of them enters loss or gradient.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    mask: Tensor
    advantages: Tensor
    weights: Tensor
    correction: Tensor | None = None

    @property
    def policy(self) -> Tensor:
        """Tokens sampled by the policy, boolean."""
        return self.mask > 0

    def log_ratio(self) -> Tensor:
        """``log pi - log pi_old`` with gradient, clamped to ``±LOG_RATIO_LIMIT``; 0 where masked."""
        return (
            visible(self.logprobs, self.mask)
            .sub(visible(self.old_logprobs, self.mask))
            .clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        )

    def total(self, surrogate: Tensor) -> Tensor:
        """``-sum_it w_it c_it surrogate_it`` over policy tokens: the loss that maximises ``surrogate``."""
        if self.correction is not None:
            surrogate = surrogate * visible(self.correction, self.mask)
        return -(self.weights * visible(surrogate, self.mask)).sum()


@dataclass(frozen=True)
class ObjectiveResult:
    """``loss`` is a scalar with gradient; the rest is detached.

    ``ratio`` is ``[sequences]`` for sequence ratios and ``[sequences, length]`` for token ratios, 1 where there is
    nothing to compare. ``zeroed`` and ``outside`` are ``[sequences, length]`` booleans: tokens whose gradient the
    clip removed, and tokens whose ratio lies outside of the band.
    """

    loss: Tensor
    ratio: Tensor
    zeroed: Tensor
    outside: Tensor


def visible(values: Tensor, mask: Tensor) -> Tensor:
    """``values`` where ``mask`` is positive, 0 elsewhere: garbage there reaches neither value nor gradient."""
    return torch.where(mask > 0, values, 0.0)
