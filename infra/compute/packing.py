"""Sequences packed by prompt, so that a prompt shared by many completions is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from infra.compute.attention.shared_prefix import make_layout, packed_logprobs

if TYPE_CHECKING:
    from torch import Tensor


def grouped_logprobs(
    model: Any,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    width: int,
    temperature: float = 1.0,
) -> Tensor:
    """Log-probs of the completions' tokens, ``[sequences, width - 1]``, aligned like ``TokenBatch.mask``.

    Sequences with equal prompts share its computation, wherever they stand. Positions of prompts and padding
    are 0. The same values and gradients as ``token_logprobs`` up to rounding.
    """
    members: dict[tuple[int, ...], list[int]] = {}
    for index, prompt in enumerate(prompts):
        members.setdefault(tuple(prompt), []).append(index)
    ids: list[int] = []
    order: list[int] = []
    for prompt, rows in members.items():
        ids += prompt
        for row in rows:
            ids += completions[row]
        order += rows
    layout = make_layout([(len(prompt), [len(completions[row]) for row in rows]) for prompt, rows in members.items()])
    flat = packed_logprobs(model, torch.tensor(ids), layout, temperature)
    lengths = [len(completions[row]) for row in order]
    rows_at = torch.tensor(order).repeat_interleave(torch.tensor(lengths))
    columns = torch.cat(
        [len(prompts[row]) - 1 + torch.arange(length) for row, length in zip(order, lengths, strict=True)]
    )
    return flat.new_zeros(len(prompts), width - 1).index_put((rows_at, columns), flat)
