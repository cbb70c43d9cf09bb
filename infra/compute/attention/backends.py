"""Which attention back-ends compute learned attention sinks; another one would drop them without a word."""

from __future__ import annotations

from typing import Any

from infra.compute.attention import shared_prefix, sinks
from infra.errors import UsageError

SINK_BACKENDS = ("eager", sinks.ATTENTION, shared_prefix.ATTENTION)
"""transformers' ``eager``, and ours."""


def require_sinks(model: Any) -> None:
    """Check that a model with sinks (one learned logit per head) runs on a back-end that has them, and has its masks.

    Raises:
        UsageError: it does not.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    backend = model.config._attn_implementation
    learned = [name for name, _ in model.named_parameters() if name.endswith(".sinks")]
    if learned and backend not in SINK_BACKENDS:
        raise UsageError(
            f"attention back-end {backend!r} ignores the model's attention sinks, such as {learned[0]}",
            where="attention of the model",
            fix=f"load it with one of {', '.join(SINK_BACKENDS)}",
        )
    if backend not in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys():
        raise UsageError(
            f"attention back-end {backend!r} has no mask function: padding would be lost",
            where="attention of the model",
            fix="register it with transformers' AttentionMaskInterface as well",
        )


def use_sink_attention(model: Any) -> None:
    """Switch a model to attention in memory linear in the length (:mod:`infra.compute.attention.sinks`).

    Raises:
        UsageError: the model cannot be switched.
    """
    sinks.register()
    try:
        model.set_attn_implementation(sinks.ATTENTION)
    except ValueError as error:
        raise UsageError(
            f"{type(model).__name__} does not take another attention: {error}",
            where="attention of the model",
            fix="train it with its own attention back-end",
        ) from error
    require_sinks(model)
