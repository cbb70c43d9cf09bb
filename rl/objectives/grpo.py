"""Objectives on token ratios: GRPO with its clip, and the published variations of it.

All take :class:`PolicyTerms`; ``r_it = pi / pi_old`` per token, its logarithm clamped to ``±LOG_RATIO_LIMIT``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl.objectives.terms import ObjectiveResult, PolicyTerms, visible


def grpo(terms: PolicyTerms, low: float | Tensor, high: float | Tensor, cap: float | None = None) -> ObjectiveResult:
    """``-sum_it w_it min(r_it A_it, clip(r_it, 1 - low, 1 + high) A_it)`` (PPO eq. 7; GRPO, arXiv 2402.03300 eq. 3).

    Args:
        low: below 1; a number, or a tensor that broadcasts to ``[sequences, length]`` (``clip.dcpo_bounds``).
        high: above 1, likewise; DAPO (arXiv 2503.14476) takes 0.2 / 0.28.
        cap: largest ratio where the advantage is negative and PPO's minimum knows no bound (two-sided clip,
            INTELLECT-2, arXiv 2505.07291: 4; dual clip, arXiv 1912.09729: 3).
    """
    ratio = terms.log_ratio().exp()
    capped = ratio if cap is None else ratio.clamp(max=cap)
    floor, ceiling = ratio.new_tensor(1.0) - low, ratio.new_tensor(1.0) + high
    clipped = torch.minimum(torch.maximum(ratio, floor), ceiling)
    loss = terms.total(torch.minimum(capped * terms.advantages, clipped * terms.advantages))
    fixed = ratio.detach()
    above, below = fixed > ceiling, fixed < floor
    zeroed = (above & (terms.advantages > 0)) | (below & (terms.advantages < 0))
    if cap is not None:
        zeroed = zeroed | ((fixed > cap) & (terms.advantages < 0))
    return ObjectiveResult(loss, fixed, terms.policy & zeroed, terms.policy & (above | below))


def cispo(terms: PolicyTerms, low: float, high: float) -> ObjectiveResult:
    """``-sum_it w_it sg[clip(r_it, 1 - low, 1 + high)] A_it log pi_it`` (MiniMax-M1, arXiv 2506.13585).

    The weight is clipped, never the gradient: ``zeroed`` is empty. ``low >= 1`` leaves the lower side open, as the
    paper does; ScaleRL takes ``high`` 4 (a weight of at most 5).
    """
    ratio = terms.log_ratio().detach().exp()
    weight = ratio.clamp(1 - low, 1 + high)
    loss = terms.total(weight * terms.advantages * visible(terms.logprobs, terms.mask))
    outside = terms.policy & ((ratio < 1 - low) | (ratio > 1 + high))
    return ObjectiveResult(loss, ratio, torch.zeros_like(outside), outside)


def gmpo(terms: PolicyTerms, log_clip: float) -> ObjectiveResult:
    """``-sum_it w_it s_i A_it``, ``s_i`` the geometric mean of clipped token ratios (arXiv 2507.20673).

    A token's log ratio is clipped to ``±log_clip`` on the side where the advantage would push it further, before
    the mean. The paper's advantages are one number per sequence, and so should they be here: ``s_i`` is shared.

    Returns:
        ``ratio [sequences]``: ``s_i``.
    """
    advantages = visible(terms.advantages, terms.mask)
    direction = advantages.sign()
    pushed = direction * terms.log_ratio()
    clipped = direction * pushed.clamp(max=log_clip)
    lengths = terms.mask.sum(-1, keepdim=True).clamp(min=1)
    ratio = ((clipped * terms.mask).sum(-1, keepdim=True) / lengths).exp()
    loss = terms.total(ratio * advantages)
    outside = terms.policy & (terms.log_ratio().detach().abs() > log_clip)
    return ObjectiveResult(loss, ratio.detach()[:, 0], terms.policy & (pushed.detach() > log_clip), outside)


def sapo(terms: PolicyTerms, temperature_positive: float, temperature_negative: float) -> ObjectiveResult:
    """``-sum_it w_it f(r_it) A_it`` with the soft gate ``f(r) = 4/tau sigmoid(tau (r - 1))`` (arXiv 2511.20347).

    ``tau`` is the positive one where ``A > 0``; the slope is 1 at ``r = 1`` and fades instead of ending, so
    ``zeroed`` and ``outside`` are empty.
    """
    ratio = terms.log_ratio().exp()
    tau = torch.where(terms.advantages > 0, temperature_positive, temperature_negative).to(ratio.dtype)
    loss = terms.total(soft_gate(ratio, tau) * terms.advantages)
    none = torch.zeros_like(terms.policy)
    return ObjectiveResult(loss, ratio.detach(), none, none)


def soft_gate(ratio: Tensor, tau: Tensor) -> Tensor:
    """``4/tau sigmoid(tau (ratio - 1))``; shapes broadcast."""
    return torch.sigmoid(tau * (ratio - 1)) * 4 / tau
