"""Exponential moving average of a model's trainable weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from infra.errors import CheckFailed


class WeightAverage:
    """``average <- d average + (1 - d) weight``, kept in float32 (float64 for float64 weights).

    Only trainable parameters are copied, once: torch's ``AveragedModel`` copies the whole model, in its own dtype,
    in which a step of ``1 - d`` is below the resolution of bfloat16.

    Args:
        model: the average starts at its present weights.
        decay: ``d``, in ``[0, 1)``.
        warm_up: use ``min(d, (1 + n) / (10 + n))`` at the n-th update (from 0), as TensorFlow's
            ``ExponentialMovingAverage(num_updates=…)`` does: early weights are forgotten sooner.
    """

    def __init__(self, model: nn.Module, decay: float, warm_up: bool = False) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be in [0, 1), not {decay}")
        self.decay, self.warm_up = decay, warm_up
        self.updates = 0
        self._live = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self._average = {name: _wide(weight).clone() for name, weight in self._live.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take the model's present weights into the average; call it after each optimizer step."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warm_up else self.decay
        for name, weight in self._live.items():
            self._average[name].lerp_(_wide(weight), 1 - decay)
        self.updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model computes with the averaged weights inside; afterwards the live ones are back, bit for bit.

        Weights change in place: an engine that copies weights must be synced inside and again afterwards.
        """
        live = {name: weight.detach().clone() for name, weight in self._live.items()}
        try:
            self._put(self._average)
            yield
        finally:
            self._put(live)

    def state_dict(self) -> dict[str, Any]:
        """``{"updates": n, "average": {name: tensor}}``; the tensors are the live ones, not copies."""
        return {"updates": self.updates, "average": dict(self._average)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            CheckFailed: it belongs to other parameters.
        """
        average: dict[str, Tensor] = state["average"]
        theirs = {name: tuple(tensor.shape) for name, tensor in average.items()}
        ours = {name: tuple(tensor.shape) for name, tensor in self._average.items()}
        if theirs != ours:
            name = min(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
            raise CheckFailed(
                f"the saved weight average has {theirs.get(name, 'nothing')} for {name}, "
                f"the model has {ours.get(name, 'nothing')}",
                where="weight average of the checkpoint",
                fix="resume with the model and the trainable parameters that the checkpoint was made with",
            )
        for name, tensor in average.items():
            self._average[name].copy_(tensor)
        self.updates = state["updates"]

    @torch.no_grad()
    def _put(self, weights: dict[str, Tensor]) -> None:
        for name, weight in self._live.items():
            weight.copy_(weights[name])


def _wide(weight: Tensor) -> Tensor:
    """At least float32, outside autograd; a narrow weight is copied, a wide one is not."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return weight.detach().to(wide)
