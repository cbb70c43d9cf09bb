"""How token losses become one number, normalised over the whole global batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl.objectives.config import Aggregation
from rl.objectives.terms import visible


@dataclass(frozen=True)
class Normaliser:
    """Counts over the *global* batch: all micro-batches, packs and ranks of one optimizer step.

    ``sequences`` counts sequences with at least one policy token that were not dropped, ``tokens`` their
    policy tokens, ``max_length`` is the constant of ``dr``.
    """

    sequences: int
    tokens: int
    max_length: int


def count(mask: Tensor, max_length: int) -> Normaliser:
    """The normaliser of the batch with this ``mask [sequences, length]``; rows of dropped sequences are all 0."""
    return Normaliser(int((mask > 0).any(-1).sum()), int((mask > 0).sum()), max_length)


def across_ranks(local: Normaliser) -> Normaliser:
    """The sum over all ranks of the default process group; ``local`` where there is none.

    With it, per-rank losses and gradients *add up* to those of one rank with the whole batch (average them, as
    DDP does, and they are too small by the number of ranks).
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return local
    counts = torch.tensor([local.sequences, local.tokens])
    if torch.distributed.get_backend() == "nccl":
        counts = counts.cuda()
    torch.distributed.all_reduce(counts)
    sequences, tokens = counts.tolist()
    return Normaliser(sequences, tokens, local.max_length)


def token_weights(mask: Tensor, mode: Aggregation, normaliser: Normaliser) -> Tensor:
    """Weights ``w [sequences, length]`` so that the loss is ``sum(w * token_loss)``.

    - ``gspo``: ``m / (N T_i)``: mean over sequences of the mean over tokens (arXiv 2507.18071, eq. 10).
    - ``luspo``: ``m / N``: sequence losses scaled by their length (arXiv 2602.05261).
    - ``dr``: ``m / (N L_max)``: unbiased in length, same scale for any length (Dr. GRPO, arXiv 2503.20783).
    - ``token``: ``m / sum m``: mean over tokens (DAPO, arXiv 2503.14476).

    Because ``N`` and ``sum m`` are global, any split into micro-batches adds up to the same loss.
    """
    sequences = max(1, normaliser.sequences)
    if mode == "gspo":
        return mask / mask.sum(-1, keepdim=True).clamp(min=1) / sequences
    if mode == "luspo":
        return mask / sequences
    if mode == "dr":
        return mask / (sequences * normaliser.max_length)
    return mask / max(1, normaliser.tokens)


def masked_mean(values: Tensor, mask: Tensor) -> float | None:
    """Mean of ``values`` over policy tokens, for reports; None where there is no such token."""
    tokens = int((mask > 0).sum())
    return float(visible(values.detach(), mask).sum()) / tokens if tokens else None
