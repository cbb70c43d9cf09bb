"""Group Sequence Policy Optimization (arXiv 2507.18071), in its token form (eq. 13-17)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl.objectives.clip import ClipBounds


@dataclass(frozen=True)
class PolicyTerms:
    """What the objective looks at; all ``[sequences, length]``.

    ``logprobs`` carry gradient, ``old_logprobs`` do not; ``mask`` is 1 on tokens sampled by the policy.
    ``advantages`` may differ per token (process rewards); ``weights`` come from ``aggregation.token_weights``;
    ``correction`` are detached trainer-rollout weights, or None.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    mask: Tensor
    advantages: Tensor
    weights: Tensor
    correction: Tensor | None = None


@dataclass(frozen=True)
class GSPOResult:
    """``loss`` is a scalar with gradient; the rest is detached.

    ``ratio [sequences]`` is the geometric mean of the token ratios over policy tokens (1 where there are none).
    ``zeroed`` and ``outside`` are ``[sequences, length]`` booleans: tokens whose gradient the clip removed,
    and tokens whose ratio lies outside of the band.
    """

    loss: Tensor
    ratio: Tensor
    zeroed: Tensor
    outside: Tensor


def gspo(terms: PolicyTerms, bounds: ClipBounds) -> GSPOResult:
    """``-sum_it w_it min(s_it A_it, clip(s_it, 1 - el_i, 1 + eh_i) A_it)``.

    ``s_i = exp(1/T_i sum_t m_it (log pi - log pi_old))`` (eq. 7) and ``s_it = sg[s_i] pi_it / sg[pi_it]``
    (eq. 14): every token carries the sequence's ratio and its own gradient. Masked positions never enter.
    """
    policy = terms.mask > 0
    live = torch.where(policy, terms.logprobs, 0.0)
    old = torch.where(policy, terms.old_logprobs, 0.0)
    lengths = terms.mask.sum(-1).clamp(min=1)
    log_ratio = ((live.detach() - old) * terms.mask).sum(-1) / lengths
    ratio = log_ratio.exp()
    token_ratio = (live - live.detach() + log_ratio[:, None]).exp()
    low, high = (1 - bounds.low)[:, None], (1 + bounds.high)[:, None]
    clipped = torch.minimum(torch.maximum(token_ratio, low), high)
    surrogate = torch.minimum(token_ratio * terms.advantages, clipped * terms.advantages)
    if terms.correction is not None:
        surrogate = surrogate * terms.correction
    loss = -(terms.weights * torch.where(policy, surrogate, 0.0)).sum()
    above, below = token_ratio.detach() > high, token_ratio.detach() < low
    zeroed = policy & ((above & (terms.advantages > 0)) | (below & (terms.advantages < 0)))
    return GSPOResult(loss, ratio, zeroed, policy & (above | below))
