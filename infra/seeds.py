"""Random numbers by address: every draw has a seed derived from what it is for, so nothing depends on history."""

from __future__ import annotations

import random
from typing import Any

from infra.hashing import content_hash


def derive_seed(*parts: str | int) -> int:
    """A 63-bit seed from a path such as ``(run_seed, "rollout", step, task, sample)``."""
    return int(content_hash(list(parts))[:16], 16) >> 1


def generator(*parts: str | int) -> random.Random:
    """A Python generator seeded by :func:`derive_seed`."""
    return random.Random(derive_seed(*parts))


def random_states() -> dict[str, Any]:
    """States of the global generators of Python, NumPy, torch and the current GPU, as plain values and tensors.

    Nothing here draws from them, but tools and verifiers of a domain may.
    """
    import numpy
    import torch

    version, internal, gauss = random.getstate()
    state = numpy.random.get_state(legacy=False)
    assert isinstance(state, dict)
    twister = state["state"]
    states = {
        "python": [version, list(internal), gauss],
        "numpy": [twister["key"].tolist(), int(twister["pos"]), int(state["has_gauss"]), float(state["gauss"])],
        "torch": torch.get_rng_state(),
    }
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def restore_random_states(states: dict[str, Any]) -> None:
    """Put :func:`random_states` back."""
    import numpy
    import torch

    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    keys, position, has_gauss, cached = states["numpy"]
    numpy.random.set_state(("MT19937", numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
