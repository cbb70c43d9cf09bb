"""Every threshold and action of the guards; in domain.yaml under ``rl.guards``. rl/guards/README.md has the table."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from infra.records import Config

Action = Literal["warn", "skip_step", "lower_lr", "stop"]
"""``skip_step`` drops the update about to be made, ``lower_lr`` multiplies the learning rate by ``lr_factor`` for
the rest of the run, ``stop`` ends the stage and keeps the last good policy."""

Reaction = Literal["off", "warn", "lower_lr", "stop"]


class Levels(Config):
    """Limits of a figure that should stay below them, one per action; null = no such limit.

    A limit counts when the last ``patience`` values all lie above it; of several, the most severe acts.
    """

    warn: float | None = None
    lower_lr: float | None = None
    stop: float | None = None
    patience: int = Field(default=1, ge=1, le=100)

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        given = [limit for limit in (self.warn, self.lower_lr, self.stop) if limit is not None]
        if given != sorted(given):
            raise ValueError("limits must rise: warn <= lower_lr <= stop")
        return self


class KLGuard(Levels):
    """k3 estimate of KL(policy || reference), nats per policy token."""

    warn: float | None = 0.05
    stop: float | None = 0.2
    patience: int = Field(default=5, ge=1, le=100)
    """The mean of k3 has a heavy tail: one sampled token that the reference likes far better lifts a whole step."""
    jump: float = Field(default=5.0, gt=1)
    """How many times the median of the ``window`` steps before is a jump, once above ``jump_floor``."""
    jump_floor: float = Field(default=0.05, ge=0)
    jump_action: Reaction = "stop"
    window: int = Field(default=20, ge=2, le=100)


class DriftK3Guard(Levels):
    """k3 estimate of KL(engine || trainer) on the sampled tokens before any update, nats per policy token."""

    warn: float | None = 1e-3
    stop: float | None = 1e-2


class DriftGuard(Levels):
    """Mean |log-prob of the engine - log-prob of the trainer| before any update, nats per policy token."""

    warn: float | None = 0.03
    stop: float | None = 0.08


class OnPolicyRatioGuard(Levels):
    """max |ratio - 1| of a step's first update, where it must be 0: float32's rounding is allowed."""

    stop: float | None = 1e-5


class StaleWeightsGuard(Levels):
    """Optimizer updates that the engine's weights lag behind the trainer's while it samples."""

    stop: float | None = 0


class EntropyGuard(Config):
    """Entropy as a share of its value at the start, while the reward has not got where it should."""

    warn: float | None = Field(default=0.1, gt=0, lt=1)
    stop: float | None = Field(default=0.01, gt=0, lt=1)
    patience: int = Field(default=5, ge=1, le=100)


class ClipAsymmetryGuard(Levels):
    """|clipped share at A > 0 - clipped share at A < 0|, mean of the last ``window`` steps with updates."""

    warn: float | None = 0.4
    stop: float | None = 0.8
    window: int = Field(default=10, ge=1, le=100)


class ZeroSignalGuard(Config):
    """Steps in a row with (nearly) all groups constant, though not because nearly all are solved."""

    constant: float = Field(default=0.95, gt=0, le=1)
    """From this share of constant groups on, a step has no signal …"""
    solved: float = Field(default=0.9, gt=0, le=1)
    """… unless this share of the groups got the full reward in every episode."""
    warn: int | None = Field(default=5, ge=1, le=100)
    stop: int | None = Field(default=15, ge=1, le=100)


class ConstantRewardGuard(Config):
    """All episodes of ``steps`` steps in a row got one and the same reward."""

    steps: int = Field(default=5, ge=2, le=100)
    action: Reaction = "stop"


class LengthGuard(Config):
    """Sampled tokens per episode against the start, while the reward does not rise."""

    warn: float | None = Field(default=2.0, gt=1)
    stop: float | None = Field(default=4.0, gt=1)
    """Factors, upwards and downwards."""
    gain: float = Field(default=0.02, ge=0)
    """A rise of the reward by more than this excuses the drift."""
    patience: int = Field(default=5, ge=1, le=100)


class ThinkingRatioGuard(Config):
    """Odds of a sampled token being a thinking token, against the start."""

    factor: float = Field(default=4.0, gt=1)
    """Allowed change of the odds, upwards and downwards."""
    least: float = Field(default=0.005, gt=0, lt=1)
    """A policy that thinks less than this from the start is not watched."""
    patience: int = Field(default=5, ge=1, le=100)
    action: Reaction = "warn"


class RepetitionGuard(Levels):
    """Share of episodes in which more than half of the 3-grams are repeats."""

    warn: float | None = 0.1
    stop: float | None = 0.5
    patience: int = Field(default=3, ge=1, le=100)


class GradientGuard(Config):
    """Gradient norm (before clipping) of an update against the running median."""

    spike: float = Field(default=10.0, gt=1)
    floor: float = Field(default=3.0, ge=0)
    """Norms below never count as a spike: rare signal after a quiet stretch is no accident. The default is three
    times the norm to which gradients are clipped by default."""
    window: int = Field(default=20, ge=3, le=100)
    least: int = Field(default=5, ge=2, le=100)
    """Steps with updates before the median is trusted."""
    action: Literal["off", "warn", "skip_step", "lower_lr", "stop"] = "skip_step"


class ParametersGuard(Config):
    """Trainable parameters that got no gradient, or whose value is bit for bit the one they started with."""

    updates: int = Field(default=10, ge=1)
    """Optimizer updates after which to look, once per run."""
    may_stay: tuple[str, ...] = ()
    """Patterns (``*.experts.*``) of names that are allowed to stay as they are."""
    action: Reaction = "stop"


class TruncatedGuard(Levels):
    """Share of episodes cut by a length limit."""

    warn: float | None = 0.5
    stop: float | None = 0.9
    patience: int = Field(default=3, ge=1, le=100)


class UnjudgedGuard(Levels):
    """Share of episodes that could not be judged."""

    warn: float | None = 0.05
    stop: float | None = 0.5
    patience: int = Field(default=3, ge=1, le=100)


class NonFiniteGuard(Config):
    """A figure that is NaN or infinite."""

    action: Literal["skip_step", "stop"] = "stop"


class GuardConfig(Config):
    """When a run is warned about, held back or stopped."""

    repeat_after: int = Field(default=20, ge=1)
    """Steps for which a guard does not say the same thing again (a stop is always said)."""
    start_steps: int = Field(default=5, ge=1, le=50)
    """What "the start" means: the median of so many first values."""
    solved: float = Field(default=0.95, gt=0, le=1)
    """A mean reward from which on low entropy and constant groups are success …"""
    progress: float = Field(default=0.5, gt=0, le=1)
    """… or this share of the way from the reward at the start to 1."""
    lr_factor: float = Field(default=0.5, gt=0, lt=1)
    max_skips: int = Field(default=5, ge=1)
    """Updates skipped in a row before the run stops."""

    kl: KLGuard = KLGuard()
    drift_k3: DriftK3Guard = DriftK3Guard()
    drift: DriftGuard = DriftGuard()
    on_policy_ratio: OnPolicyRatioGuard = OnPolicyRatioGuard()
    stale_weights: StaleWeightsGuard = StaleWeightsGuard()
    entropy: EntropyGuard = EntropyGuard()
    clip_asymmetry: ClipAsymmetryGuard = ClipAsymmetryGuard()
    zero_signal: ZeroSignalGuard = ZeroSignalGuard()
    constant_reward: ConstantRewardGuard = ConstantRewardGuard()
    length: LengthGuard = LengthGuard()
    thinking_ratio: ThinkingRatioGuard = ThinkingRatioGuard()
    repetition: RepetitionGuard = RepetitionGuard()
    gradient: GradientGuard = GradientGuard()
    parameters: ParametersGuard = ParametersGuard()
    truncated: TruncatedGuard = TruncatedGuard()
    unjudged: UnjudgedGuard = UnjudgedGuard()
    non_finite: NonFiniteGuard = NonFiniteGuard()
