"""Do all trainable parameters get a gradient, and does it change them?"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


class ParameterWatch:
    """Remembers how trainable parameters began (a checksum of their bits) and which of them ever got a gradient.

    Under sharding, give each rank its local shards and merge what they report: a parameter is unmoved only where
    all its shards are.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self._parameters = {name: parameter for name, parameter in named if parameter.requires_grad}
        self._start = {name: checksum(parameter) for name, parameter in self._parameters.items()}
        self._waiting = set(self._parameters)

    @property
    def without_gradient(self) -> tuple[str, ...]:
        """Parameters whose gradient was None or all 0 at every look; after one backward, a preflight check."""
        return tuple(name for name in self._parameters if name in self._waiting)

    def look(self) -> None:
        """Note which parameters have a gradient now: after backward, before gradients are cleared."""
        for name in tuple(self._waiting):
            gradient = self._parameters[name].grad
            # NaN counts as a gradient here: non_finite has its own guard.
            if gradient is not None and bool(gradient.any()):
                self._waiting.discard(name)

    def unmoved(self) -> dict[str, bool]:
        """Names of parameters without gradient (False) or with the bits they began with in spite of one (True).

        One without gradient counts even if its bits differ: weight decay alone moves it.
        """
        found = {}
        for name, parameter in self._parameters.items():
            if name in self._waiting:
                found[name] = False
            elif checksum(parameter) == self._start[name]:
                found[name] = True
        return found

    def state_dict(self) -> dict[str, Any]:
        """Plain values that :meth:`load_state_dict` restores exactly."""
        return {"start": dict(self._start), "waiting": sorted(self._waiting)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        self._start = dict(state["start"])
        self._waiting = set(state["waiting"])


def checksum(tensor: Tensor) -> int:
    """CRC-32 of the tensor's bytes, in the order of its elements."""
    flat = tensor.detach().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).cpu().numpy().data)
