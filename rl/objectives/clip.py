"""Clip bounds of the sequence ratio, widened or narrowed by how exceptional an advantage is in its group."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rl.config import ClipConfig

RMS_EPSILON = 1e-8


@dataclass(frozen=True)
class ClipBounds:
    """Per sequence: a ratio is clipped to ``[1 - low, 1 + high]``. Shapes ``[sequences]``."""

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
