"""Sampling one token per row, each row with its own settings and its own random number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infra.errors import CheckFailed
from infra.inference.engine import SamplingParams


def sample(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Draw tokens by inverting each row's distribution function at its uniform number.

    Args:
        logits: ``[rows, vocabulary]``; ``-inf`` is probability 0.
        params: per row; temperature 0 takes the most likely token.
        uniforms: per row, in [0, 1).

    Returns:
        tokens ``[rows]`` and their log-probs ``[rows]`` under the distribution sampled from (after
        temperature and truncation; at temperature 0 under the untruncated one at temperature 1).

    Raises:
        CheckFailed: a row has NaN, ``+inf`` or nothing but ``-inf``: it is no distribution.
    """
    temperature = torch.tensor([p.temperature for p in params])
    greedy = temperature == 0
    # The maximum goes first, so that no temperature, however small, makes a logit infinite.
    shifted = logits.float() - logits.amax(-1, keepdim=True)
    logprobs = torch.log_softmax(shifted / temperature.masked_fill(greedy, 1.0)[:, None], -1)
    cut = [row for row, p in enumerate(params) if p.truncates and not greedy[row]]
    if cut:
        logprobs[cut] = _truncate(logprobs[cut], [params[row] for row in cut])
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    if bool(total.isnan().any()):
        broken = total[:, 0].isnan().nonzero()[0].item()
        raise CheckFailed(
            f"the policy's logits are not finite: it cannot sample (row {broken} of {len(params)})",
            where="embedded engine, sampling",
            fix="its weights are broken: go back to the last checkpoint, and lower the learning rate if it diverged",
        )
    targets = torch.tensor(uniforms, dtype=torch.float64)[:, None] * total
    # A product that rounds up to the total would fall on the last token, whatever its probability.
    targets = targets.minimum(total.nextafter(torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    if bool(greedy.any()):
        tokens = torch.where(greedy, logprobs.argmax(-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _truncate(logprobs: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Keep each row's tokens and renormalise.

    First min-p and top-k, then top-p on what these left, as vLLM does. Of equally likely tokens the lowest ids are
    kept, and the most likely one always is.
    """
    vocabulary = logprobs.shape[1]
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.double().exp()
    top_k = torch.tensor([p.top_k or vocabulary for p in params])[:, None]
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64)[:, None]
    min_p = torch.tensor([p.min_p for p in params], dtype=torch.float64)[:, None]
    keep = (torch.arange(vocabulary) < top_k) & (probabilities >= min_p * probabilities[:, :1])
    left = probabilities * keep
    before = left.cumsum(-1) - left
    keep &= (before < top_p * left.sum(-1, keepdim=True)) | (top_p >= 1)
    keep[:, 0] = True
    kept = torch.zeros_like(keep).scatter_(1, order, keep)
    return torch.log_softmax(logprobs.masked_fill(~kept, float("-inf")), -1)
