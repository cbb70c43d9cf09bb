"""What a model says of tokens that were sampled: log-probs, entropies and a critic's values, in one forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infra.compute.attention.shared_prefix import make_layout, packed_logits, supports
from infra.compute.logprobs import TokenBatch, at_least_float32

SHARED_PROMPT = 32
"""Tokens from which on a group's prompt is computed once; below, a padded batch is as fast."""

Critic = Callable[[Tensor], Tensor]
"""Values ``[tokens]`` of hidden states ``[tokens, hidden]``."""


@dataclass(frozen=True)
class Scores:
    """All ``[sequences, length - 1]``, aligned like ``TokenBatch.mask``; None where not asked for.

    ``entropy`` is that of the distribution the token was drawn from, in nats; ``values`` the critic's at the state
    before the token. At prompts and padding the columns may hold anything.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    values: Tensor | None = None


def score(
    model: Any,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    batch: TokenBatch,
    temperature: float = 1.0,
    entropy: bool = False,
    critic: Critic | None = None,
) -> Scores:
    """Score a batch; a prompt that completions share is computed once where it is long enough to matter.

    Args:
        batch: ``prompts`` and ``completions`` padded (``logprobs.pad_sequences``).
        temperature: of the sampling.
    """
    if supports(model) and min(map(len, prompts)) >= SHARED_PROMPT:
        return grouped_scores(model, prompts, completions, batch.ids.shape[1], temperature, entropy, critic)
    with _hidden_states(model, critic is not None) as hidden:
        output = model(input_ids=batch.ids, attention_mask=batch.attention, use_cache=False)
    flat = _score(output.logits[:, :-1], batch.ids[:, 1:], temperature, entropy)
    values = None if critic is None else critic(hidden[0][:, :-1])
    return Scores(flat.logprobs, flat.entropy, values)


def grouped_scores(
    model: Any,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    width: int,
    temperature: float = 1.0,
    entropy: bool = False,
    critic: Critic | None = None,
) -> Scores:
    """``[sequences, width - 1]``: sequences with equal prompts share its computation, wherever they stand.

    Prompts and padding are 0. The same values and gradients as a padded batch up to rounding.
    """
    members: dict[tuple[int, ...], list[int]] = {}
    for index, prompt in enumerate(prompts):
        members.setdefault(tuple(prompt), []).append(index)
    ids: list[int] = []
    for prompt, rows in members.items():
        ids += prompt
        for row in rows:
            ids += completions[row]
    layout = make_layout([(len(prompt), [len(completions[row]) for row in rows]) for prompt, rows in members.items()])
    row_ids = torch.tensor(ids)
    with _hidden_states(model, critic is not None) as hidden:
        logits = packed_logits(model, row_ids, layout, layout.predictor)
    flat = _score(logits, row_ids[layout.target], temperature, entropy)
    values = None if critic is None else critic(hidden[0][0])
    order = [row for rows in members.values() for row in rows]
    lengths = [len(completions[row]) for row in order]
    rows_at = torch.tensor(order).repeat_interleave(torch.tensor(lengths))
    columns = torch.cat(
        [len(prompts[row]) - 1 + torch.arange(length) for row, length in zip(order, lengths, strict=True)]
    )

    def spread(column: Tensor) -> Tensor:
        return column.new_zeros(len(prompts), width - 1).index_put((rows_at, columns), column)

    return Scores(
        spread(flat.logprobs),
        None if flat.entropy is None else spread(flat.entropy),
        None if values is None else spread(values),
    )


def _score(logits: Tensor, tokens: Tensor, temperature: float, entropy: bool) -> Scores:
    """Log-probs (and entropies) of ``tokens [...]`` under ``logits [..., vocabulary]``."""
    logp = torch.log_softmax(at_least_float32(logits) / temperature, -1)
    chosen = logp.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return Scores(chosen, -(logp.exp() * logp).sum(-1) if entropy else None)


@contextmanager
def _hidden_states(model: Any, wanted: bool) -> Iterator[list[Tensor]]:
    """Collects what goes into the model's output projection."""
    seen: list[Tensor] = []
    if not wanted:
        yield seen
        return
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    try:
        yield seen
    finally:
        handle.remove()
