"""Padded batches and the log-probs of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TokenBatch:
    """Right-padded sequences.

    ``ids`` and ``attention`` are ``[sequences, length]``; ``mask`` is ``[sequences, length - 1]``: column ``t``
    speaks of token ``t + 1``, as predicted at position ``t``; 1 = sampled by the policy.
    """

    ids: Tensor
    attention: Tensor
    mask: Tensor


def pad_sequences(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], masks: Sequence[Sequence[int]], pad_id: int
) -> TokenBatch:
    """Stack ``prompt + completion`` rows; ``masks[i]`` aligns with ``completions[i]``."""
    import torch

    rows = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
    length = max(map(len, rows))
    ids = torch.full((len(rows), length), pad_id)
    attention = torch.zeros(len(rows), length, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        attention[i, : len(row)] = 1
    return TokenBatch(ids, attention, align(prompts, masks, length))


def align(prompts: Sequence[Sequence[int]], values: Sequence[Sequence[float]], length: int) -> Tensor:
    """Per-completion-token values as ``[sequences, length - 1]``, aligned like ``TokenBatch.mask``; 0 elsewhere."""
    import torch

    out = torch.zeros(len(prompts), length)
    for i, (prompt, value) in enumerate(zip(prompts, values, strict=True)):
        out[i, len(prompt) : len(prompt) + len(value)] = torch.tensor(value, dtype=torch.float)
    return out[:, 1:]


def token_logprobs(model: Any, batch: TokenBatch, temperature: float = 1.0) -> Tensor:
    """Log-prob of every token given its past, ``[sequences, length - 1]``, at the sampling temperature."""
    import torch

    logits = model(input_ids=batch.ids, attention_mask=batch.attention, use_cache=False).logits[:, :-1]
    scaled = torch.log_softmax(at_least_float32(logits) / temperature, -1)
    return scaled.gather(2, batch.ids[:, 1:, None])[..., 0]


def at_least_float32(x: Tensor) -> Tensor:
    """Half-precision values as float32; wider ones as they are."""
    return x.float() if x.dtype.itemsize < 4 else x
