"""What a model says of tokens that were sampled: log-probs, entropies and a critic's values, in one forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from infra.compute.attention.shared_prefix import body, make_layout, packed_hidden, supports
from infra.compute.linear_logprobs import linear_logprobs, logits_logprobs
from infra.compute.logprobs import TokenBatch

SHARED_PROMPT = 32
"""Tokens from which on a group's prompt is computed once; below, a padded batch is as fast."""

LONG = 1024
"""Tokens from which on a padded batch would need memory for each pair of them; rows are packed from there on."""
PLAIN_HEADS = ("gpt_oss", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Model types whose logits are their last hidden state times the head's weight, and nothing else."""

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

    Logits of the whole vocabulary are never held for all tokens at once (``PLAIN_HEADS``), nor, with GPT-OSS, anything
    for all pairs of tokens.

    Args:
        batch: ``prompts`` and ``completions`` padded (``logprobs.pad_sequences``).
        temperature: of the sampling.
    """
    if supports(model) and (min(map(len, prompts)) >= SHARED_PROMPT or batch.ids.shape[1] >= LONG):
        return grouped_scores(model, prompts, completions, batch.ids.shape[1], temperature, entropy, critic)
    inputs = {"input_ids": batch.ids, "attention_mask": batch.attention, "use_cache": False}
    if not plain_head(model):
        return _score_logits(model, inputs, batch.ids[:, 1:], temperature, entropy, critic)
    hidden = body(model)(**inputs).last_hidden_state[:, :-1]
    return _score(model, hidden, batch.ids[:, 1:], temperature, entropy, critic)


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
    hidden = packed_hidden(model, row_ids, layout, layout.predictor)
    flat = _score(model, hidden, row_ids[layout.target], temperature, entropy, critic)
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
        None if flat.values is None else spread(flat.values),
    )


def plain_head(model: Any) -> bool:
    """Whether logits are a plain product with the head's weight, so that they can be computed tile by tile."""
    head = model.get_output_embeddings()
    return model.config.model_type in PLAIN_HEADS and type(head) is nn.Linear and head.bias is None


def _score(
    model: Any, hidden: Tensor, tokens: Tensor, temperature: float, entropy: bool, critic: Critic | None
) -> Scores:
    """Scores of ``tokens [...]`` predicted by ``hidden [..., hidden]``."""
    flat = hidden.flatten(0, -2)
    head = model.get_output_embeddings()
    if plain_head(model):
        found = linear_logprobs(flat, head.weight, tokens.flatten(), temperature, entropy)
    else:
        found = logits_logprobs(head(flat), tokens.flatten(), temperature, entropy)
    return Scores(
        found.logprobs.view(tokens.shape),
        None if found.entropy is None else found.entropy.view(tokens.shape),
        None if critic is None else critic(hidden),
    )


def _score_logits(
    model: Any, inputs: dict[str, Any], tokens: Tensor, temperature: float, entropy: bool, critic: Critic | None
) -> Scores:
    """Scores by the model's own logits, which may be more than a product."""
    seen: list[Tensor] = []
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    try:
        logits = model(**inputs).logits[:, :-1]
    finally:
        handle.remove()
    found = logits_logprobs(logits, tokens, temperature, entropy)
    return Scores(found.logprobs, found.entropy, None if critic is None else critic(seen[0][:, :-1]))
