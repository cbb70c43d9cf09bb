"""KL divergence from the reference policy, estimated on sampled tokens (J. Schulman, "Approximating KL divergence").

``d = log pi - log pi_ref`` per token, clamped to ``±LOG_RATIO_LIMIT`` (k3 <= 4.9e8: finite in float32, and where
the clamp holds the gradient is 0). The clamped tokens are counted, never silent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rl.objectives.terms import LOG_RATIO_LIMIT, visible

Estimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True)
class KLEstimate:
    """``values [sequences, length]`` carry the gradient of ``logprobs`` and are 0 where masked.

    ``clamped`` (a scalar) counts policy tokens with ``|d| > LOG_RATIO_LIMIT``, a reference of -inf among them.
    """

    values: Tensor
    clamped: Tensor


def kl_estimate(logprobs: Tensor, reference: Tensor, mask: Tensor, estimator: Estimator) -> KLEstimate:
    """Per-token estimate of KL(pi || pi_ref); all ``[sequences, length]``.

    ``k1 = d``: unbiased, high variance. ``k2 = d²/2``: biased value, but as a loss its on-policy gradient is that
    of the KL. ``k3 = exp(-d) - 1 + d``: unbiased and positive, for monitoring; as a loss biased in first order
    (arXiv 2510.01555).
    """
    raw = visible(logprobs, mask) - visible(reference.detach(), mask)
    d = raw.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    values = d if estimator == "k1" else d.square() / 2 if estimator == "k2" else torch.expm1(-d) + d
    return KLEstimate(values, (raw.detach().abs() > LOG_RATIO_LIMIT).sum())


def kl_loss(
    logprobs: Tensor,
    reference: Tensor,
    mask: Tensor,
    weights: Tensor,
    estimator: Literal["k2", "k3"],
    old_logprobs: Tensor | None = None,
) -> tuple[Tensor, KLEstimate]:
    """KL as a part of the loss, ``sum_it w_it k_it``, to be multiplied by its coefficient; and the estimate.

    k1 is not offered: its gradient is that of ``log pi``, which pulls towards nothing.

    Args:
        weights: the policy loss's own, ``aggregation.token_weights``.
        old_logprobs: of the policy that sampled; when given, every token is multiplied by its live ratio
            ``pi / pi_old``, which keeps the estimate unbiased off-policy (DeepSeek-V3.2, arXiv 2512.02556).
    """
    estimate = kl_estimate(logprobs, reference, mask, estimator)
    values = estimate.values
    if old_logprobs is not None:
        log_ratio = visible(logprobs, mask) - visible(old_logprobs.detach(), mask)
        values = values * log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return (weights * visible(values, mask)).sum(), KLEstimate(values, estimate.clamped)


def reward_penalty(logprobs: Tensor, reference: Tensor, mask: Tensor, coefficient: float) -> Tensor:
    """KL as a part of the reward: what to subtract per sequence, ``beta sum_t m k1``, detached ``[sequences]``.

    On-policy the gradient equals that of k2 in the loss (arXiv 2510.01555): use one of the two, never both
    (:class:`rl.objectives.config.KLConfig` has one place).
    """
    return coefficient * kl_estimate(logprobs.detach(), reference, mask, "k1").values.sum(-1)
