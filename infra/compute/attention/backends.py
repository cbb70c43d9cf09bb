"""Which attention back-ends compute learned attention sinks; another one would drop them without a word."""

from __future__ import annotations

from typing import Any

from infra.compute.attention.shared_prefix import ATTENTION
from infra.errors import UsageError

SINK_BACKENDS = ("eager", ATTENTION)
"""transformers' ``eager``, and ours."""


def require_sinks(model: Any) -> None:
    """Check that a model with sinks (one learned logit per head) runs on a back-end that has them.

    Raises:
        UsageError: it does not.
    """
    backend = model.config._attn_implementation
    sinks = [name for name, _ in model.named_parameters() if name.endswith(".sinks")]
    if sinks and backend not in SINK_BACKENDS:
        raise UsageError(
            f"attention back-end {backend!r} ignores the model's attention sinks, such as {sinks[0]}",
            where="attention of the model",
            fix=f"load it with one of {', '.join(SINK_BACKENDS)}",
        )
