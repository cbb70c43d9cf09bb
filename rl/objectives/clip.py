"""Clip bounds of the sequence ratio, widened or narrowed by how exceptional an advantage is in its group; and
published dynamic bounds of the token ratio.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl.objectives.config import ClipConfig

RMS_EPSILON = 1e-8


@dataclass(frozen=True)
class ClipBounds:
    """A ratio is clipped to ``[1 - low, 1 + high]``. Shapes ``[sequences]``, or ``[sequences, length]`` per token."""

    low: Tensor
    high: Tensor


def clip_bounds(advantages: Tensor, group_rms: Tensor, config: ClipConfig) -> ClipBounds:
    """Advantage-decoupled bounds; modulation 0 gives the plain range, bit for bit.

    With ``z = |A| / (rms_group(A) + 1e-8)`` and ``phi = tanh(max(0, z - z0) / kappa)``:
    ``high = clamp(eh (1 + lp phi [A > 0]))``, ``low = clamp(el (1 + ln phi [A < 0]))``.
    A balanced group has z = 1 and keeps the plain range; a rare success (1 of 8: z = 2.65) gets a wider upper
    bound. Scaling all rewards changes nothing.

    Args:
        advantages: outcome advantages ``[sequences]`` (never process scores).
        group_rms: root mean square of the advantages of the sequence's group ``[sequences]``.
    """
    a = advantages.detach()
    phi = ((a.abs() / (group_rms.detach() + RMS_EPSILON) - config.z0).clamp(min=0) / config.kappa).tanh()
    smallest, largest = config.min_ratio * config.low, config.max_ratio * config.high
    high = (config.high * (1 + config.modulation_high * phi * (a > 0))).clamp(smallest, largest)
    low = (config.low * (1 + config.modulation_low * phi * (a < 0))).clamp(smallest, largest)
    return ClipBounds(low, high)


def dcpo_bounds(old_logprobs: Tensor, low: float, high: float, cap: float = 10.0) -> ClipBounds:
    """Bounds per token that open as the old probability ``q`` falls (DCPO, arXiv 2509.02333).

    ``0.5 + 0.5 sqrt(max(1 - 4 low / q, 0)) <= r <= min(0.5 + 0.5 sqrt(1 + 4 high / q), cap)``; 0.16 / 0.2 there.

    Args:
        old_logprobs: ``log q [sequences, length]``.
    """
    q = old_logprobs.detach().exp()
    lowest = 0.5 + 0.5 * (1 - 4 * low / q).clamp(min=0).sqrt()
    highest = (0.5 + 0.5 * (1 + 4 * high / q).sqrt()).clamp(max=cap)
    return ClipBounds(1 - lowest, highest - 1)


def sigmoid_bounds(
    advantages: Tensor, old_logprobs: Tensor, base: float = 0.2, width: float = 0.15, power: float = 1.8
) -> ClipBounds:
    """Bounds per token shifted by the advantage, as found in public code (a baseline; no paper identified).

    ``delta = sigmoid(|A|) p^power`` with the old probability ``p`` (``1 - p`` where ``A > 0``);
    ``high = base + width delta sign(A)``, ``low = base - width delta sign(A)``. Shapes ``[sequences, length]``.
    """
    a, p = advantages.detach(), old_logprobs.detach().exp()
    shift = width * torch.sigmoid(a.abs()) * torch.where(a > 0, 1 - p, p) ** power * a.sign()
    return ClipBounds(base - shift, base + shift)
