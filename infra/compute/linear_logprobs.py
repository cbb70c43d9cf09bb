"""Log-probs and entropy of given tokens straight from hidden states, without logits for the whole vocabulary.

With ``z = hidden @ weight.T / temperature`` and ``p = softmax(z)``: ``logprob = z_id - lse(z)`` and
``entropy = lse(z) - sum_j p_j z_j``. The vocabulary is walked in tiles, the sums over it are carried along, and the
backward pass computes each tile again:

    d logprob / d z_j = [j = id] - p_j
    d entropy / d z_j = -p_j (log p_j + entropy)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from infra.compute.logprobs import at_least_float32

TOKEN_CHUNK = 1024
VOCAB_CHUNK = 8192


@dataclass(frozen=True)
class LogProbs:
    """Of each token ``[tokens]``: its log-prob and, when asked for, the entropy (nats) of the whole distribution."""

    logprobs: Tensor
    entropy: Tensor | None


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    temperature: float = 1.0,
    entropy: bool = False,
    token_chunk: int = TOKEN_CHUNK,
    vocab_chunk: int = VOCAB_CHUNK,
) -> LogProbs:
    """Exact log-probs of ``ids`` under ``softmax(hidden @ weight.T / temperature)``, differentiable once.

    Needs memory for two tiles of ``token_chunk * vocab_chunk`` and for the gradients, whatever the vocabulary; without
    gradients nothing is kept. What fits into one tile is left to plain autograd, which is faster there. Half-precision
    inputs give float32 results and are accumulated in float32.

    Args:
        hidden: ``[tokens, hidden]``, the state that predicts each token.
        weight: ``[vocabulary, hidden]`` of the output layer.
        ids: ``[tokens]``.
        temperature: the one the tokens were sampled at.
        entropy: also return the entropy.
        token_chunk: rows of a tile.
        vocab_chunk: columns of a tile.

    Raises:
        ValueError: shapes do not fit, an id is outside the vocabulary, or the temperature is not positive.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or ids.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and ids {tuple(ids.shape)} do not fit: "
            "[tokens, hidden], [vocabulary, hidden] and [tokens] are needed"
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < weight.shape[0]:
        raise ValueError(f"ids run from {int(ids.min())} to {int(ids.max())}, the vocabulary has {weight.shape[0]}")
    if ids.numel() * weight.shape[0] <= token_chunk * vocab_chunk:
        return logits_logprobs(at_least_float32(hidden) @ at_least_float32(weight).T, ids, temperature, entropy)
    tiling = _Tiling(hidden.shape[0], weight.shape[0], token_chunk, vocab_chunk, temperature)
    logprobs, entropies = _LinearLogProbs.apply(hidden, weight, ids, tiling, entropy)  # type: ignore[no-untyped-call]
    return LogProbs(logprobs, entropies)


def logits_logprobs(logits: Tensor, ids: Tensor, temperature: float = 1.0, entropy: bool = False) -> LogProbs:
    """The same from logits ``[..., vocabulary]`` that are there already, for ``ids [...]``, by plain autograd."""
    wide = at_least_float32(logits)
    logp = torch.log_softmax(wide if temperature == 1.0 else wide / temperature, -1)
    entropies = -(logp.exp() * logp).sum(-1) if entropy else None
    return LogProbs(logp.gather(-1, ids[..., None])[..., 0], entropies)


@dataclass(frozen=True)
class _Tiling:
    """How the ``[tokens, vocabulary]`` plane is cut; the vocabulary is the outer loop, so weights are read once."""

    total_tokens: int
    total_vocab: int
    token_chunk: int
    vocab_chunk: int
    temperature: float

    def tokens(self) -> list[slice]:
        return _cut(self.total_tokens, self.token_chunk)

    def vocab(self) -> list[slice]:
        return _cut(self.total_vocab, self.vocab_chunk)

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """One tile of scaled logits, in the dtype of the sums."""
        tile = _product(hidden, weight.T, _sum_dtype(hidden))
        return tile if self.temperature == 1.0 else tile.div_(self.temperature)


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, tiling: _Tiling, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        lse = torch.empty_like(ids, dtype=_sum_dtype(hidden))
        target = torch.empty_like(lse)
        entropies = torch.empty_like(lse) if entropy else None
        for vocab in tiling.vocab():
            for rows in tiling.tokens():
                tile = tiling.logits(hidden[rows], weight[vocab])
                at, inside = _locate(ids[rows], vocab)
                target[rows] = torch.where(inside, tile.gather(1, at)[:, 0], target[rows])
                part, part_entropy = _summarise(tile, entropy)
                del tile
                if vocab.start:
                    total = torch.logaddexp(lse[rows], part)
                    if entropies is not None and part_entropy is not None:
                        part_entropy = _merge(entropies[rows], total - lse[rows], part_entropy, total - part)
                    part = total
                lse[rows] = part
                if entropies is not None and part_entropy is not None:
                    entropies[rows] = part_entropy
        ctx.save_for_backward(hidden, weight, ids, lse, entropies)
        ctx.set_materialize_grads(False)
        ctx.tiling = tiling
        return target - lse, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, ids, lse, entropies = ctx.saved_tensors
        tiling: _Tiling = ctx.tiling
        scaled = torch.zeros_like(lse) if grad is None else grad.to(lse.dtype) / tiling.temperature
        scaled_entropy = None if grad_entropy is None else grad_entropy.to(lse.dtype) / tiling.temperature
        d_hidden = torch.zeros_like(hidden, dtype=lse.dtype) if ctx.needs_input_grad[0] else None
        d_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for vocab in tiling.vocab():
            d_part = torch.zeros_like(weight[vocab], dtype=lse.dtype) if d_weight is not None else None
            for rows in tiling.tokens():
                tile = tiling.logits(hidden[rows], weight[vocab]).sub_(lse[rows, None])
                if scaled_entropy is None:
                    tile.exp_().mul_(-scaled[rows, None])
                else:
                    p = tile.exp()
                    tile.add_(entropies[rows, None]).mul_(scaled_entropy[rows, None]).add_(scaled[rows, None])
                    tile.mul_(p).neg_()
                    del p
                at, inside = _locate(ids[rows], vocab)
                tile.scatter_add_(1, at, (scaled[rows] * inside)[:, None])
                if d_hidden is not None:
                    _add_product(d_hidden[rows], tile, weight[vocab])
                if d_part is not None:
                    _add_product(d_part, tile.T, hidden[rows])
                del tile
            if d_weight is not None and d_part is not None:
                d_weight[vocab] = d_part
        return d_hidden if d_hidden is None else d_hidden.to(hidden.dtype), d_weight, None, None, None


def _cut(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype.itemsize < 4 else x.dtype


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``a @ b`` summed up in ``dtype``; with half-precision factors only CUDA's tensor cores do that by themselves."""
    if a.is_cuda and b.dtype != dtype:
        return torch.mm(a.to(b.dtype), b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b``, summed up in the dtype of ``total``."""
    if b.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += _product(a, b, total.dtype)


def _locate(ids: Tensor, vocab: slice) -> tuple[Tensor, Tensor]:
    """Column of each id in a tile ``[tokens, 1]`` (clamped), and whether the tile holds it ``[tokens]``."""
    inside = (ids >= vocab.start) & (ids < vocab.stop)
    return (ids - vocab.start).clamp_(0, vocab.stop - vocab.start - 1)[:, None], inside


def _summarise(tile: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Log-sum-exp of each row and, when asked for, the entropy of its softmax; ``tile`` is overwritten."""
    top = tile.amax(1)
    tile.sub_(top[:, None])
    if not entropy:
        return tile.exp_().sum(1).log_().add_(top), None
    e = tile.exp()
    total = e.sum(1)
    log_total = total.log()
    return log_total + top, log_total - tile.mul_(e).sum(1) / total


def _merge(entropy: Tensor, surprise: Tensor, other: Tensor, other_surprise: Tensor) -> Tensor:
    """Entropy of two parts of a distribution together, from that within each and minus the log of each one's share.

    A sum of positive terms, unlike the difference of log-sum-exp and mean logit, which cancels.
    """
    return (-surprise).exp() * (entropy + surprise) + (-other_surprise).exp() * (other + other_surprise)
