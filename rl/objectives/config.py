"""Settings of the objectives; everything but plain GSPO is off by default. rl/README.md has the table."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from infra.records import Config

Aggregation = Literal["gspo", "dr", "luspo", "token"]
Baseline = Literal["mean", "leave_one_out"]


class ClipConfig(Config):
    """Clip range of the sequence ratio, and how a rare success widens it (modulation 0 = plain GSPO).

    3e-4 / 4e-4 is the GSPO paper's range for large models (arXiv 2507.18071, sec. 5.1).
    """

    low: float = Field(default=3e-4, gt=0)
    high: float = Field(default=4e-4, gt=0)
    modulation_high: float = Field(default=1.0, ge=0)
    modulation_low: float = Field(default=0.0, gt=-1)
    z0: float = Field(default=1.0, ge=0)
    kappa: float = Field(default=1.0, gt=0)
    min_ratio: float = Field(default=1 / 3, gt=0)
    """Smallest modulated bound, as a multiple of ``low``."""
    max_ratio: float = Field(default=6.25, gt=0)
    """Largest modulated bound, as a multiple of ``high`` (2.5e-3 for the default range)."""


class GSPO(Config):
    """Sequence ratio (arXiv 2507.18071); its clip range is ``rl.clip``."""

    name: Literal["gspo"] = "gspo"


class GRPO(Config):
    """Token ratio with PPO's clip (arXiv 2402.03300); 0.2 / 0.28 is DAPO's range (arXiv 2503.14476)."""

    name: Literal["grpo"] = "grpo"
    low: float = Field(default=0.2, gt=0, lt=1)
    high: float = Field(default=0.28, gt=0)
    cap: float | None = Field(default=None, gt=1)
    """Largest ratio at negative advantages (arXiv 2505.07291: 4)."""


class CISPO(Config):
    """Clipped, detached weight on log pi (arXiv 2506.13585); ``low`` 1 leaves the lower side open."""

    name: Literal["cispo"] = "cispo"
    low: float = Field(default=1.0, gt=0)
    high: float = Field(default=4.0, gt=0)


class GMPO(Config):
    """Geometric mean of clipped token ratios (arXiv 2507.20673)."""

    name: Literal["gmpo"] = "gmpo"
    log_clip: float = Field(default=0.4, gt=0)


class SAPO(Config):
    """Soft gate in place of the clip (arXiv 2511.20347)."""

    name: Literal["sapo"] = "sapo"
    temperature_positive: float = Field(default=1.0, gt=0)
    temperature_negative: float = Field(default=1.05, gt=0)


class DCPO(Config):
    """Token clip that opens as the old probability falls (arXiv 2509.02333)."""

    name: Literal["dcpo"] = "dcpo"
    low: float = Field(default=0.16, gt=0)
    high: float = Field(default=0.2, gt=0)
    cap: float = Field(default=10.0, gt=1)


class PPO(Config):
    """Token clip with a critic and generalised advantage estimation (arXiv 1707.06347, 1506.02438)."""

    name: Literal["ppo"] = "ppo"
    low: float = Field(default=0.2, gt=0, lt=1)
    high: float = Field(default=0.2, gt=0)
    cap: float | None = Field(default=None, gt=1)
    value_clip: float = Field(default=0.2, gt=0)
    value_coefficient: float = Field(default=0.5, ge=0)
    gamma: float = Field(default=1.0, gt=0, le=1)
    lam: float = Field(default=1.0, ge=0, le=1)
    whiten: bool = True


CriticFree = GSPO | GRPO | CISPO | GMPO | SAPO | DCPO
"""Objectives that need advantages only."""
Objective = Annotated[CriticFree | PPO, Field(discriminator="name")]


class KLConfig(Config):
    """Penalty for leaving the reference policy; it has one place, so it is never charged twice."""

    coefficient: float = Field(default=0.0, ge=0)
    """0 = no penalty and no reference policy needed for it."""
    place: Literal["loss", "reward"] = "loss"
    """In the loss with ``estimator``, or in the reward with k1."""
    estimator: Literal["k2", "k3"] = "k2"
    unbiased: bool = False
    """Multiply the loss's estimate by the live ratio (arXiv 2512.02556): for several updates per rollout."""
    measure: bool = True
    """Report the KL to the policy at the start of the stage at every step, which the guard needs: one forward of that
    policy over the step's episodes."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.place == "reward" and self.model_fields_set & {"estimator", "unbiased"}:
            raise ValueError("in the reward the estimator is always k1: leave estimator and unbiased out")
        return self


class CorrectionConfig(Config):
    """What to do about the engine's log-probs not being the trainer's."""

    old_logprobs: Literal["bypass", "recompute"] = "recompute"
    """``bypass``: the engine's stand for pi_old, as long as the mismatch is at most a third of the clip bound."""
    weights: Literal["off", "token_tis", "icepop", "sequence_tis"] = "off"
    mask: Literal["off", "geometric", "k3"] = "off"
    cap: float = Field(default=2.0, gt=1)
    """C of truncated importance sampling; 1.5 … 5 per token, 2 … 10 per sequence."""
    icepop_low: float = Field(default=0.5, ge=0, le=1)
    icepop_high: float = Field(default=5.0, ge=1)
    geometric_low: float = Field(default=0.999, gt=0, le=1)
    geometric_high: float = Field(default=1.001, ge=1)
    k3_limit: float = Field(default=0.01, gt=0)
    off_policy_limit: float | None = Field(default=None, gt=0)
    """Drop negative sequences that the policy has left by more than this, nats per token (0.5 is usual)."""

    @model_validator(mode="after")
    def _needs_both(self) -> Self:
        if self.old_logprobs == "bypass" and (self.weights != "off" or self.mask != "off"):
            raise ValueError("weights and mask compare the trainer with the engine: set old_logprobs to recompute")
        return self


class LengthConfig(Config):
    """Penalties for length and repetition, and what happens to truncated episodes."""

    overlong_cache: int | None = Field(default=None, ge=1)
    """Tokens before the limit over which the penalty rises to its full size (DAPO: a fifth of the limit)."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    truncated: Literal["keep", "mask"] = "keep"
    """``mask``: truncated episodes leave the loss; their reward stays in the baseline."""
    ngram: int = Field(default=3, ge=1)
    ngram_penalty: float = Field(default=0.0, ge=0)
    """What an answer made of nothing but repeats loses."""
    ngram_limit: float | None = Field(default=None, ge=0, lt=1)
    """From this share of repeats on the reward is at most 0 (0.5 is usual)."""
    run_window: int | None = Field(default=None, ge=2)
    """Tokens in a row, each more likely than ``run_threshold``, that end a generation; see ``length.run_window``."""
    run_threshold: float = Field(default=0.99, gt=0, lt=1)


class EntropyConfig(Config):
    """The floor below which entropy is pushed back up."""

    largest: float = Field(default=0.0, ge=0)
    """Largest coefficient (0 = off; 0.05 is usual)."""
    step: float = Field(default=0.005, gt=0)
    target: float | None = Field(default=None, gt=0)
    """Nats per token; null = ``share`` times the entropy of the first step."""
    share: float = Field(default=0.3, gt=0, lt=1)
