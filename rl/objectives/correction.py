"""The rollout engine's log-probs differ from the trainer's: measure it, correct for it, refuse to train on it.

``rho_it = pi_old / mu`` per token, with ``pi_old`` the trainer's log-probs of the weights that sampled and ``mu``
the engine's; its logarithm clamped to ``±LOG_RATIO_LIMIT``. Everything here is detached.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rl.objectives.config import CorrectionConfig
from rl.objectives.terms import LOG_RATIO_LIMIT, visible

BYPASS_SHARE = 1 / 3
"""Largest mismatch, as a share of the lower clip bound, with which the engine's log-probs may stand for pi_old."""


@dataclass(frozen=True)
class RolloutRatio:
    """``token [sequences, length]`` is rho, 0 where masked; the rest ``[sequences]``.

    ``log`` are the token logarithms, ``product`` and ``geometric`` the product and geometric mean over policy
    tokens (1 where there are none), ``k3`` the mean of ``rho - 1 - log rho`` (0 where there are none).
    """

    log: Tensor
    token: Tensor
    product: Tensor
    geometric: Tensor
    k3: Tensor


@dataclass(frozen=True)
class CorrectionMetrics:
    """Sums over policy tokens; metrics of parts of a batch add up with ``+``.

    ``k1``, ``k3`` and ``absolute`` are sums of log(mu / pi_old), of the k3 estimate of KL(mu || pi_old), and of
    |log rho|; ``largest`` is the largest |log rho|. ``capped`` tokens had their weight cut, ``dropped_tokens`` got
    weight 0, ``dropped_sequences`` lost all their tokens to a sequence mask; ``clamped`` counts tokens beyond the
    limit of the logarithm.
    """

    sequences: int
    tokens: int
    k1: float
    k3: float
    absolute: float
    largest: float
    capped: int
    dropped_tokens: int
    dropped_sequences: int
    clamped: int

    def __add__(self, other: CorrectionMetrics) -> CorrectionMetrics:
        return CorrectionMetrics(
            self.sequences + other.sequences,
            self.tokens + other.tokens,
            self.k1 + other.k1,
            self.k3 + other.k3,
            self.absolute + other.absolute,
            max(self.largest, other.largest),
            self.capped + other.capped,
            self.dropped_tokens + other.dropped_tokens,
            self.dropped_sequences + other.dropped_sequences,
            self.clamped + other.clamped,
        )

    @property
    def k3_mean(self) -> float:
        """k3 estimate of KL(mu || pi_old), nats per policy token; NaN where there is no token."""
        return self.k3 / self.tokens if self.tokens else math.nan

    def figures(self) -> dict[str, float]:
        """For tracking; empty where there is no token: no measurement is not a measurement of 0."""
        if not self.tokens:
            return {}
        return {
            "rl.logprob_drift_k1": self.k1 / self.tokens,
            "rl.logprob_drift_k3": self.k3 / self.tokens,
            "rl.logprob_drift": self.absolute / self.tokens,
            "rl.logprob_drift_max": self.largest,
            "rl.correction_capped": self.capped / self.tokens,
            "rl.correction_dropped_tokens": self.dropped_tokens / self.tokens,
            "rl.correction_dropped_sequences": self.dropped_sequences / self.sequences,
            "rl.correction_clamped": self.clamped / self.tokens,
        }


@dataclass(frozen=True)
class Correction:
    """``weights [sequences, length]`` for ``PolicyTerms.correction``, 0 where masked; ``keep [sequences]``."""

    weights: Tensor
    keep: Tensor
    metrics: CorrectionMetrics


def rollout_ratio(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> RolloutRatio:
    """Ratios of trainer to engine; all inputs ``[sequences, length]``."""
    return _ratio(_log_ratio(old_logprobs, rollout_logprobs, mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), mask)


def correct(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, config: CorrectionConfig) -> Correction:
    """Weights of the tokens of a batch, and what was measured.

    ``config.weights``: ``off`` 1 · ``token_tis`` ``min(rho, C)`` (truncated importance sampling) · ``icepop``
    ``rho`` inside ``[alpha, beta]``, else 0 · ``sequence_tis`` ``min(prod_t rho, C)``, the same on all tokens of a
    sequence. ``config.mask`` drops sequences: ``geometric`` unless their geometric mean lies inside the bounds ·
    ``k3`` unless their mean k3 is at most the threshold. A dropped token still counts in the normaliser: to drop
    some must not turn up the others.

    Args:
        old_logprobs: the trainer's, of the weights that sampled ``[sequences, length]``.
        rollout_logprobs: the engine's, recorded when it sampled.
    """
    raw = _log_ratio(old_logprobs, rollout_logprobs, mask)
    ratio = _ratio(raw.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), mask)
    policy = mask > 0
    capped = torch.zeros_like(policy)
    weights = policy.to(ratio.token.dtype)
    if config.weights == "token_tis":
        weights, capped = ratio.token.clamp(max=config.cap), ratio.token > config.cap
    elif config.weights == "icepop":
        weights = torch.where((ratio.token >= config.icepop_low) & (ratio.token <= config.icepop_high), ratio.token, 0)
    elif config.weights == "sequence_tis":
        weights = weights * ratio.product.clamp(max=config.cap)[:, None]
        capped = policy & (ratio.product > config.cap)[:, None]
    keep = torch.ones_like(ratio.k3, dtype=torch.bool)
    if config.mask == "geometric":
        keep = (ratio.geometric >= config.geometric_low) & (ratio.geometric <= config.geometric_high)
    elif config.mask == "k3":
        keep = ratio.k3 <= config.k3_limit
    weights = torch.where(keep[:, None], weights, 0)
    metrics = CorrectionMetrics(
        sequences=int(policy.any(-1).sum()),
        tokens=int(policy.sum()),
        k1=-float(ratio.log.sum()),
        k3=float(_k3(ratio.log).sum()),
        absolute=float(ratio.log.abs().sum()),
        largest=float(ratio.log.abs().max()) if ratio.log.numel() else 0.0,
        capped=int((capped & keep[:, None]).sum()),
        dropped_tokens=int((policy & (weights == 0)).sum()),
        dropped_sequences=int((~keep & policy.any(-1)).sum()),
        clamped=int((raw.abs() > LOG_RATIO_LIMIT).sum()),
    )
    return Correction(weights, keep, metrics)


def bypass_allowed(metrics: CorrectionMetrics, clip_low: float) -> bool:
    """Whether the engine's log-probs may stand for pi_old (no recomputation): ``k3_mean <= clip_low / 3``.

    With them ``E log s = -KL(mu || pi_old)`` per token: when that nears the clip bound, long negative sequences are
    all clipped and only positive ones learn. NaN (nothing measured) does not allow it.
    """
    return metrics.k3_mean <= clip_low * BYPASS_SHARE


def off_policy_keep(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, advantages: Tensor, limit: float) -> Tensor:
    """Sequences to keep ``[sequences]``: all but those with ``A < 0`` and ``mean_t(log pi_old - log pi) > limit``.

    Negative samples that the policy has already left teach it nothing and destabilise (DeepSeek-V3.2, arXiv
    2512.02556). Multiply ``PolicyTerms.correction`` by it.

    Args:
        advantages: ``[sequences]``.
        limit: nats per token; TRL suggests 0.5.
    """
    left = -_log_ratio(logprobs, old_logprobs, mask).sum(-1) / (mask > 0).sum(-1).clamp(min=1)
    return ~((advantages < 0) & (left > limit))


def _log_ratio(new: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    return visible(new.detach(), mask) - visible(old.detach(), mask)


def _ratio(log: Tensor, mask: Tensor) -> RolloutRatio:
    lengths = (mask > 0).sum(-1).clamp(min=1)
    total = log.sum(-1)
    return RolloutRatio(
        log=log,
        token=visible(log.exp(), mask),
        product=total.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(),
        geometric=(total / lengths).exp(),
        k3=_k3(log).sum(-1) / lengths,
    )


def _k3(log: Tensor) -> Tensor:
    return torch.expm1(log) - log
