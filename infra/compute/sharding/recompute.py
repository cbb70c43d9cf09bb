"""Activation checkpointing in which the backward pass visits the experts of the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from infra.errors import UsageError

_SAVED = [torch.ops.aten.topk.default]
"""Kept, not computed again: a router whose logits (nearly) tie may choose differently the second time."""


def recompute_in_backward(module: nn.Module) -> None:
    """Keep only the inputs of a layer and the choices of its router; the rest is computed again (in place, once).

    Values and gradients stay the same, whatever the second computation rounds to: gate weights and expert ids are
    those of the forward pass. Costs ``top_k`` values and ids per token. Chen et al. 2016
    (https://arxiv.org/abs/1604.06174), with torch's non-reentrant implementation.
    """
    forward: Callable[..., Any] = module.forward

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if kwargs.get("cache") is not None:
            raise UsageError(
                "a layer that is computed again in the backward pass would write its keys and values twice",
                where="activation_checkpointing",
                fix="call the model with use_cache=False when training",
            )
        return checkpoint(forward, *args, use_reentrant=False, context_fn=_contexts, **kwargs)

    module.forward = checkpointed


def _contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    first, again = create_selective_checkpoint_contexts(_SAVED)  # type: ignore[no-untyped-call]
    return first, again
