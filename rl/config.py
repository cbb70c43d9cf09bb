"""Settings of reinforcement learning and evaluation."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from infra.compute.adapters import LoraSettings
from infra.records import Config
from rl.guards.config import GuardConfig
from rl.objectives.config import (
    GSPO,
    PPO,
    Aggregation,
    Baseline,
    ClipConfig,
    CorrectionConfig,
    EntropyConfig,
    KLConfig,
    LengthConfig,
    Objective,
)

__all__ = ["ClipConfig", "EvalConfig", "RLConfig"]

Schedule = Literal["linear", "cosine", "constant"]


class RLConfig(Config):
    """Group-relative policy optimisation on episodes.

    A step samples ``groups`` tasks × ``group_size`` episodes and makes ``epochs`` passes over them in
    minibatches of ``minibatch`` sequences; a minibatch is computed in micro-batches of ``microbatch``.
    """

    steps: int = Field(default=50, ge=1)
    groups: int = Field(default=16, ge=1)
    group_size: int = Field(default=8, ge=2)
    sampling_rounds: int = Field(default=1, ge=1)
    """Most rounds of ``groups`` tasks that a step samples until ``groups`` of them carry signal (dynamic sampling,
    arXiv 2503.14476); after the last round it trains on what there is."""
    epochs: int = Field(default=2, ge=1)
    minibatch: int = Field(default=64, ge=1)
    microbatch: int = Field(default=64, ge=1)
    learning_rate: float = Field(default=1e-6, gt=0)
    warmup_steps: int = Field(default=5, ge=0)
    schedule: Schedule = "linear"
    """How the learning rate falls after the warm-up."""
    final_learning_rate: float = Field(default=0.1, ge=0, le=1)
    """What it falls to, as a share of ``learning_rate``."""
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    objective: Objective = GSPO()
    clip: ClipConfig = ClipConfig()
    aggregation: Aggregation = "dr"
    baseline: Baseline = "mean"
    normalise_std: bool = False
    correction: CorrectionConfig = CorrectionConfig()
    kl: KLConfig = KLConfig()
    entropy: EntropyConfig = EntropyConfig()
    length: LengthConfig = LengthConfig()
    guards: GuardConfig = GuardConfig()
    lora: LoraSettings | None = None
    """Train low-rank adapters instead of all weights; the policy that is saved has them merged."""
    freeze_router: bool = False
    """Leave the routers of a mixture of experts as they are: its load balance stays that of the policy it began with
    (RL has no load-balancing loss)."""
    average: float = Field(default=0.0, ge=0, lt=1)
    """Decay of an exponential moving average of the weights (0 = off). With it, the averaged weights are evaluated on
    dev and saved."""
    keep: Literal["best", "last"] = "best"
    """Which weights become the policy: those with the best dev success, or those of the last step."""
    temperature: float = Field(default=1.0, gt=0)
    max_tokens: int = Field(default=96, ge=1)
    """Most tokens the policy may sample in an episode; tool results are not counted."""
    max_turns: int = Field(default=8, ge=1)
    eval_every: int = Field(default=25, ge=0)
    """Steps between evaluations on the dev split (0 = only at the end)."""
    checkpoint_every: int = Field(default=5, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1)

    @model_validator(mode="after")
    def _sizes(self) -> Self:
        if self.microbatch > self.minibatch:
            raise ValueError(f"microbatch ({self.microbatch}) exceeds minibatch ({self.minibatch})")
        cache = self.length.overlong_cache
        if cache is not None and cache > self.max_tokens:
            raise ValueError(f"length.overlong_cache ({cache}) exceeds max_tokens ({self.max_tokens})")
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.lora is not None and self.lora.dropout:
            raise ValueError("lora.dropout must be 0 in RL: old and new log-probs would come from two policies")
        if self.sampling_rounds > 1 and isinstance(self.objective, PPO):
            raise ValueError("sampling_rounds looks for groups with variance, which ppo does not need: leave it at 1")
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
