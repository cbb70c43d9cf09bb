"""Settings of reinforcement learning and evaluation."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from infra.records import Config

Aggregation = Literal["gspo", "dr", "luspo", "token"]


class ClipConfig(Config):
    """Clip range of the sequence ratio and its modulation by the advantage (0 = plain GSPO).

    3e-4 / 4e-4 is the GSPO paper's range for large models (arXiv 2507.18071, sec. 5.1).
    """

    low: float = Field(default=3e-4, gt=0)
    high: float = Field(default=4e-4, gt=0)
    modulation_high: float = Field(default=0.0, ge=0)
    modulation_low: float = Field(default=0.0, gt=-1)
    z0: float = Field(default=1.0, ge=0)
    kappa: float = Field(default=1.0, gt=0)
    min_ratio: float = Field(default=1 / 3, gt=0)
    """Smallest modulated bound, as a multiple of ``low``."""
    max_ratio: float = Field(default=6.25, gt=0)
    """Largest modulated bound, as a multiple of ``high`` (2.5e-3 for the default range)."""


class RLConfig(Config):
    """Group-relative policy optimisation on episodes.

    A step samples ``groups`` tasks × ``group_size`` episodes and makes ``epochs`` passes over them in
    minibatches of ``minibatch`` sequences; a minibatch is computed in micro-batches of ``microbatch``.
    """

    steps: int = Field(default=50, ge=1)
    groups: int = Field(default=16, ge=1)
    group_size: int = Field(default=8, ge=2)
    epochs: int = Field(default=2, ge=1)
    minibatch: int = Field(default=64, ge=1)
    microbatch: int = Field(default=64, ge=1)
    learning_rate: float = Field(default=1e-6, gt=0)
    warmup_steps: int = Field(default=5, ge=0)
    final_learning_rate: float = Field(default=0.1, ge=0, le=1)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    clip: ClipConfig = ClipConfig()
    aggregation: Aggregation = "gspo"
    normalise_std: bool = False
    temperature: float = Field(default=1.0, gt=0)
    max_tokens: int = Field(default=96, ge=1)
    """Most tokens the policy may sample in an episode; tool results are not counted."""
    max_turns: int = Field(default=8, ge=1)
    eval_every: int = Field(default=25, ge=0)
    """Steps between evaluations on the dev split (0 = only at the end); the best weights on dev are kept."""
    checkpoint_every: int = Field(default=5, ge=1)

    @model_validator(mode="after")
    def _sizes(self) -> Self:
        if self.microbatch > self.minibatch:
            raise ValueError(f"microbatch ({self.microbatch}) exceeds minibatch ({self.minibatch})")
        return self


class EvalConfig(Config):
    """Evaluation of a policy on a split: once greedy, once sampled at ``temperature``."""

    max_tokens: int = Field(default=96, ge=1)
    max_turns: int = Field(default=8, ge=1)
    temperature: float = Field(default=1.0, gt=0)
    batch_size: int = Field(default=256, ge=1)
    """Episodes in flight at once."""
    max_unjudged: float = Field(default=0.05, ge=0, lt=1)
    """Largest share of episodes without a verdict; above it, shares of the judged ones would say too little."""
