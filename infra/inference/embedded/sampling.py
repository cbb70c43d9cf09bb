"""Sampling one token per row, each row with its own settings and its own random number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infra.inference.engine import SamplingParams


def sample(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Draw tokens by inverting each row's distribution function at its uniform number.

    Args:
        logits: ``[rows, vocabulary]``.
        params: per row; temperature 0 takes the most likely token.
        uniforms: per row, in [0, 1).

    Returns:
        tokens ``[rows]`` and their log-probs ``[rows]`` under the distribution sampled from (after
        temperature and truncation; at temperature 0 under the untruncated one at temperature 1).
    """
    temperature = torch.tensor([p.temperature for p in params])
    greedy = temperature == 0
    logprobs = torch.log_softmax(logits.float() / temperature.masked_fill(greedy, 1.0)[:, None], -1)
    if any(p.temperature and (p.top_k or p.top_p < 1 or p.min_p) for p in params):
        logprobs = _truncate(logprobs, params)
    cumulative = logprobs.double().exp().cumsum(-1)
    targets = torch.tensor(uniforms, dtype=torch.float64)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, targets, right=True)[:, 0].clamp(max=logits.shape[1] - 1)
    if bool(greedy.any()):
        tokens = torch.where(greedy, logprobs.argmax(-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _truncate(logprobs: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Keep the top-k, top-p and min-p tokens of each row and renormalise."""
    vocabulary = logprobs.shape[1]
    ordered, order = logprobs.sort(-1, descending=True)
    probabilities = ordered.exp()
    before = probabilities.cumsum(-1) - probabilities
    rank = torch.arange(vocabulary)
    top_k = torch.tensor([p.top_k or vocabulary for p in params])[:, None]
    top_p = torch.tensor([p.top_p for p in params])[:, None]
    min_p = torch.tensor([p.min_p for p in params])[:, None]
    keep = (rank < top_k) & ((before < top_p) | (top_p >= 1)) & (probabilities >= min_p * probabilities[:, :1])
    keep[:, 0] = True
    keep |= torch.tensor([p.temperature == 0 for p in params])[:, None]
    kept = torch.zeros_like(keep).scatter_(1, order, keep)
    return torch.log_softmax(logprobs.masked_fill(~kept, float("-inf")), -1)
