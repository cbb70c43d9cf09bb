"""Random numbers by address: every draw has a seed derived from what it is for, so nothing depends on history."""

from __future__ import annotations

import random

from infra.hashing import content_hash


def derive_seed(*parts: str | int) -> int:
    """A 63-bit seed from a path such as ``(run_seed, "rollout", step, task, sample)``."""
    return int(content_hash(list(parts))[:16], 16) >> 1


def generator(*parts: str | int) -> random.Random:
    """A Python generator seeded by :func:`derive_seed`."""
    return random.Random(derive_seed(*parts))
