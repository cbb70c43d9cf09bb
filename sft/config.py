"""Settings of the cold start."""

from __future__ import annotations

from pydantic import Field

from infra.records import Config


class Reliability(Config):
    """Stop the cold start once demonstrations of ``source`` are followed reliably enough.

    The measure is teacher-forced on dev demonstrations: the probability that every trained token of the
    demonstrated path comes out right, given that the path was entered (the first token in which it differs
    from the other sources' demonstrations of the same task is not counted). A path that fails often is
    abandoned by reinforcement learning before it can pay off, so the cold start ends by this measure and not
    by a number of steps.
    """

    source: str
    min: float = Field(gt=0, lt=1)
    every: int = Field(default=10, ge=1)
    """Optimizer steps between two measurements."""
    cooldown: int = Field(default=60, ge=1)
    """Steps of linear learning-rate decay after the measure was reached."""


class SFTConfig(Config):
    """Optimisation of the cold start; a step sees ``batch_size`` tasks, one demonstration each."""

    max_steps: int = Field(default=600, ge=1)
    batch_size: int = Field(default=32, ge=1)
    learning_rate: float = Field(default=3e-3, gt=0)
    warmup_steps: int = Field(default=20, ge=0)
    final_learning_rate: float = Field(default=0.05, ge=0, le=1)
    """Smallest share of ``learning_rate`` during the decay."""
    weight_decay: float = Field(default=0.01, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    max_length: int = Field(default=512, ge=8)
    """Longest rendered demonstration in tokens; a longer one is an error, never cut silently."""
    mixture: dict[str, float] = Field(default_factory=dict)
    """Weight per demonstration source; empty = all sources alike. A task's demonstration is redrawn each time."""
    until: Reliability | None = None
    checkpoint_every: int = Field(default=50, ge=1)
