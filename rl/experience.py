"""The episodes of a step that carry signal, as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from infra.compute.logprobs import TokenBatch, align, pad_sequences
from rl.trajectory import Trajectory


@dataclass(frozen=True)
class Experience:
    """One row per episode; token columns are ``[sequences, length - 1]``, aligned like ``TokenBatch.mask``.

    ``rollout_logprobs`` are the engine's. ``old_logprobs`` are those of the policy before the step's first update as
    the objective sees them; None = whatever the first (and only) forward says. ``correction``, ``reference``,
    ``old_values`` and ``returns`` are there where a setting needs them. ``advantages`` and ``group_rms`` are
    ``[sequences]``, ``token_advantages`` is there where they differ by token.
    """

    prompts: Sequence[Sequence[int]]
    completions: Sequence[Sequence[int]]
    batch: TokenBatch
    rollout_logprobs: Tensor
    advantages: Tensor
    group_rms: Tensor
    old_logprobs: Tensor | None = None
    correction: Tensor | None = None
    reference: Tensor | None = None
    token_advantages: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None

    @property
    def count(self) -> int:
        """Sequences."""
        return len(self.prompts)

    def rows(self, indices: Sequence[int]) -> Experience:
        """Some of the episodes, cut to the longest of them."""
        at = torch.tensor(indices)
        width = int(self.batch.attention[at].sum(1).max())
        cut: dict[str, Tensor] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Tensor):
                cut[each.name] = value[at] if value.dim() == 1 else value[at, : width - 1]
        batch = TokenBatch(
            self.batch.ids[at, :width], self.batch.attention[at, :width], self.batch.mask[at, : width - 1]
        )
        prompts, completions = [self.prompts[i] for i in indices], [self.completions[i] for i in indices]
        return replace(self, prompts=prompts, completions=completions, batch=batch, **cut)

    def spread_advantages(self) -> Tensor:
        """Advantages per token ``[sequences, length - 1]``."""
        if self.token_advantages is not None:
            return self.token_advantages
        return self.advantages[:, None].expand_as(self.batch.mask)


def make_experience(
    trajectories: Sequence[Trajectory], values: Sequence[float], rms: Sequence[float], pad: int
) -> Experience:
    """Stack trajectories; ``values`` and ``rms`` are their advantages and those' root mean square in the group."""
    prompts, completions = [t.prompt for t in trajectories], [t.ids for t in trajectories]
    batch = pad_sequences(prompts, completions, [t.mask for t in trajectories], pad)
    rollout = align(prompts, [t.logprobs for t in trajectories], batch.ids.shape[1])
    return Experience(prompts, completions, batch, rollout, torch.tensor(values), torch.tensor(rms))
