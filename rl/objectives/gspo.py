"""Group Sequence Policy Optimization (arXiv 2507.18071), in its token form (eq. 13-17)."""

from __future__ import annotations

import torch

from rl.objectives.clip import ClipBounds
from rl.objectives.terms import ObjectiveResult, PolicyTerms

__all__ = ["GSPOResult", "PolicyTerms", "gspo"]

GSPOResult = ObjectiveResult


def gspo(terms: PolicyTerms, bounds: ClipBounds) -> GSPOResult:
    """``-sum_it w_it min(s_it A_it, clip(s_it, 1 - el_i, 1 + eh_i) A_it)``.

    ``s_i = exp(1/T_i sum_t m_it (log pi - log pi_old))`` (eq. 7) and ``s_it = sg[s_i] pi_it / sg[pi_it]``
    (eq. 14): every token carries the sequence's ratio and its own gradient. Masked positions never enter.

    Returns:
        ``ratio [sequences]``: the geometric mean of the token ratios over policy tokens.
    """
    policy = terms.policy
    live = torch.where(policy, terms.logprobs, 0.0)
    old = torch.where(policy, terms.old_logprobs, 0.0)
    lengths = terms.mask.sum(-1).clamp(min=1)
    log_ratio = ((live.detach() - old) * terms.mask).sum(-1) / lengths
    ratio = log_ratio.exp()
    token_ratio = (live - live.detach() + log_ratio[:, None]).exp()
    low, high = (1 - bounds.low)[:, None], (1 + bounds.high)[:, None]
    clipped = torch.minimum(torch.maximum(token_ratio, low), high)
    loss = terms.total(torch.minimum(token_ratio * terms.advantages, clipped * terms.advantages))
    above, below = token_ratio.detach() > high, token_ratio.detach() < low
    zeroed = policy & ((above & (terms.advantages > 0)) | (below & (terms.advantages < 0)))
    return GSPOResult(loss, ratio, zeroed, policy & (above | below))
