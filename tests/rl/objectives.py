"""Oracles and random batches for the tests of the objectives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl.objectives.aggregation import Normaliser, count, token_weights
from rl.objectives.choice import policy_loss
from rl.objectives.clip import clip_bounds
from rl.objectives.config import (
    CISPO,
    DCPO,
    GMPO,
    GRPO,
    GSPO,
    PPO,
    SAPO,
    Aggregation,
    ClipConfig,
    CorrectionConfig,
    CriticFree,
)
from rl.objectives.correction import correct
from rl.objectives.entropy import entropy_bonus
from rl.objectives.kl import kl_loss
from rl.objectives.ppo import ppo
from rl.objectives.process import mix
from rl.objectives.terms import PolicyTerms, visible

ORACLES: dict[str, dict[str, Any]] = {
    case["name"]: case
    for case in json.loads((Path(__file__).parents[1] / "oracles" / "gspo_oracles.json").read_text())["cases"]
}
TOLERANCE: dict[str, Any] = {"rtol": 0.0, "atol": 1e-12}
PLAIN = ClipConfig(low=3e-4, high=4e-4, modulation_high=0)
MODULATED = ClipConfig(low=3e-4, high=4e-4, modulation_high=1.0)

CRITIC_FREE: list[CriticFree] = [GSPO(), GRPO(cap=1.5), CISPO(high=0.2), GMPO(), SAPO(), DCPO()]
OBJECTIVES: list[CriticFree | PPO] = [*CRITIC_FREE, PPO()]
AGGREGATIONS: list[Aggregation] = ["gspo", "dr", "luspo", "token"]


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(ours: Any, theirs: Any) -> None:
    """Equal to 1e-12, absolute."""
    a = ours.detach() if isinstance(ours, Tensor) else tensor(ours)
    torch.testing.assert_close(a, tensor(theirs).expand_as(a), **TOLERANCE)


@dataclass(frozen=True)
class Batch:
    """What any objective looks at; ``outcome``, ``rms`` and ``failed`` ``[rows]``, the rest ``[rows, length]``."""

    logprobs: Tensor
    old: Tensor
    rollout: Tensor
    reference: Tensor
    mask: Tensor
    process: Tensor
    think: Tensor
    values: Tensor
    old_values: Tensor
    returns: Tensor
    outcome: Tensor
    rms: Tensor
    failed: Tensor

    def rows(self, at: Sequence[int]) -> Batch:
        return Batch(**{f.name: getattr(self, f.name)[list(at)] for f in fields(self)})

    def columns(self, at: Tensor, length: int, filler: float) -> Batch:
        """The same tokens in other columns (``at [rows, old length]``); the new ones hold ``filler``, masked."""
        changed = {}
        for f in fields(self):
            value: Tensor = getattr(self, f.name)
            if value.dim() == 2:
                wide = value.new_full((value.shape[0], length), 0.0 if f.name in ("mask", "think") else filler)
                value = wide.scatter(1, at, value)
            changed[f.name] = value
        return Batch(**changed)

    def leaf(self) -> Batch:
        """A copy whose log-probs and values ask for gradients."""
        parts = {f.name: getattr(self, f.name).clone() for f in fields(self)}
        parts["logprobs"].requires_grad_()
        parts["values"].requires_grad_()
        return Batch(**parts)


def random_batch(seed: int, rows: int, length: int, scale: float = 0.3, empty_row: bool = True) -> Batch:
    """Log ratios of size ``scale``; the first row has no policy token if ``empty_row``."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = (torch.rand(rows, length, generator=generator) < 0.7).double()
    mask[0] = 0.0 if empty_row else 1.0
    old = -2 * torch.rand(rows, length, generator=generator, dtype=torch.float64) - 0.01
    return Batch(
        logprobs=old + scale * normal(rows, length),
        old=old,
        rollout=old + 0.5 * normal(rows, length),
        reference=old + 0.5 * normal(rows, length),
        mask=mask,
        process=normal(rows, length),
        think=mask * (torch.rand(rows, length, generator=generator) < 0.5),
        values=normal(rows, length),
        old_values=normal(rows, length),
        returns=normal(rows, length),
        outcome=normal(rows),
        rms=torch.rand(rows, generator=generator, dtype=torch.float64) + 0.1,
        failed=torch.rand(rows, generator=generator) < 0.5,
    )


def loss_of(
    batch: Batch, objective: CriticFree | PPO, aggregation: Aggregation, normaliser: Normaliser | None = None
) -> Tensor:
    """The loss with everything on: correction, process advantages, KL, entropy bonus, dynamic clip."""
    whole = normaliser or count(batch.mask, batch.mask.shape[1])
    weights = token_weights(batch.mask, aggregation, whole)
    correction = correct(batch.old, batch.rollout, batch.mask, RECOMPUTED).weights
    if isinstance(objective, GMPO):  # one advantage per sequence
        advantages = batch.outcome[:, None].expand_as(batch.mask)
    else:
        advantages = mix(batch.outcome, batch.process, batch.think, 0.2, batch.failed)
    terms = PolicyTerms(batch.logprobs, batch.old, batch.mask, advantages, weights, correction)
    if isinstance(objective, PPO):
        loss = ppo(terms, batch.values, batch.old_values, batch.returns, objective).loss
    else:
        loss = policy_loss(terms, objective, clip_bounds(batch.outcome, batch.rms, MODULATED)).loss
    kl, _ = kl_loss(batch.logprobs, batch.reference, batch.mask, weights, "k3", batch.old)
    seen = visible(batch.logprobs, batch.mask)
    entropy = -seen * seen.exp()
    return loss + 0.05 * kl + entropy_bonus(entropy, batch.mask, weights, 0.01)


RECOMPUTED = CorrectionConfig(old_logprobs="recompute", weights="token_tis")


def gradients(loss: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Of log-probs and values; zeros where the loss does not depend on them."""
    parts = torch.autograd.grad(loss, [batch.logprobs, batch.values], allow_unused=True, retain_graph=True)
    first, second = (torch.zeros_like(batch.logprobs) if part is None else part for part in parts)
    return first, second
