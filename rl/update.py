"""The loss of one micro-batch, and what is counted on the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from infra.compute.scores import Scores
from rl.config import RLConfig
from rl.experience import Experience
from rl.objectives.aggregation import Normaliser, token_weights
from rl.objectives.choice import policy_loss
from rl.objectives.clip import clip_bounds
from rl.objectives.config import PPO
from rl.objectives.correction import off_policy_keep
from rl.objectives.entropy import entropy_bonus
from rl.objectives.kl import kl_loss
from rl.objectives.ppo import ppo
from rl.objectives.terms import ObjectiveResult, PolicyTerms, visible


@dataclass(frozen=True)
class Counts:
    """Sums over policy tokens; those of parts of a step add up with ``+``.

    ``clipped_positive`` of the ``positive`` tokens with A > 0 lost their gradient to the clip; likewise negative.
    ``ratio_error`` is the largest ``|ratio - 1|``.
    """

    loss: float = 0.0
    tokens: int = 0
    zeroed: int = 0
    outside: int = 0
    positive: int = 0
    clipped_positive: int = 0
    negative: int = 0
    clipped_negative: int = 0
    kl_clamped: int = 0
    value_loss: float = 0.0
    ratio_error: float = 0.0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.loss + other.loss,
            self.tokens + other.tokens,
            self.zeroed + other.zeroed,
            self.outside + other.outside,
            self.positive + other.positive,
            self.clipped_positive + other.clipped_positive,
            self.negative + other.negative,
            self.clipped_negative + other.clipped_negative,
            self.kl_clamped + other.kl_clamped,
            self.value_loss + other.value_loss,
            max(self.ratio_error, other.ratio_error),
        )

    def figures(self, updates: int) -> dict[str, float]:
        """For tracking; a share of nothing is absent."""
        shares = {
            "rl.clip_fraction": (self.zeroed, self.tokens),
            "rl.ratio_outside": (self.outside, self.tokens),
            "rl.clip_fraction_positive": (self.clipped_positive, self.positive),
            "rl.clip_fraction_negative": (self.clipped_negative, self.negative),
        }
        figures = {name: part / whole for name, (part, whole) in shares.items() if whole}
        return {"rl.loss": self.loss / updates, **figures}


def part_loss(
    part: Experience, scores: Scores, config: RLConfig, normaliser: Normaliser, entropy_coefficient: float
) -> tuple[Tensor, Counts]:
    """Loss of a micro-batch, normalised over its whole minibatch; the losses of all its parts add up.

    Where ``part.old_logprobs`` is None the policy has not been updated since it sampled: the ratio is exactly 1.
    """
    mask, live = part.batch.mask, scores.logprobs
    old = live.detach() if part.old_logprobs is None else part.old_logprobs
    weights = token_weights(mask, config.aggregation, normaliser)
    correction, limit = part.correction, config.correction.off_policy_limit
    if limit is not None:
        keep = off_policy_keep(live, old, mask, part.advantages, limit)[:, None].to(live.dtype)
        correction = keep.expand_as(mask) if correction is None else correction * keep
    terms = PolicyTerms(live, old, mask, part.spread_advantages(), weights, correction)
    value_loss = 0.0
    if isinstance(config.objective, PPO):
        assert scores.values is not None
        assert part.old_values is not None
        assert part.returns is not None
        both = ppo(terms, scores.values, part.old_values, part.returns, config.objective)
        loss, result, value_loss = both.loss, both.policy, float(both.value.loss.detach())
    else:
        result = policy_loss(terms, config.objective, clip_bounds(part.advantages, part.group_rms, config.clip))
        loss = result.loss
    clamped = 0
    if config.kl.coefficient > 0 and config.kl.place == "loss":
        assert part.reference is not None
        kl, estimate = kl_loss(
            live, part.reference, mask, weights, config.kl.estimator, old if config.kl.unbiased else None
        )
        loss, clamped = loss + config.kl.coefficient * kl, int(estimate.clamped)
    if entropy_coefficient > 0:
        assert scores.entropy is not None
        loss = loss + entropy_bonus(scores.entropy, mask, weights, entropy_coefficient)
    return loss, _counts(loss, terms, result, clamped, value_loss)


def _counts(loss: Tensor, terms: PolicyTerms, result: ObjectiveResult, clamped: int, value_loss: float) -> Counts:
    policy, advantages = terms.policy, visible(terms.advantages, terms.mask)
    positive, negative = policy & (advantages > 0), policy & (advantages < 0)
    ratio = result.ratio if result.ratio.dim() == 1 else visible(result.ratio - 1, terms.mask) + 1
    return Counts(
        loss=float(loss.detach()),
        tokens=int(policy.sum()),
        zeroed=int(result.zeroed.sum()),
        outside=int(result.outside.sum()),
        positive=int(positive.sum()),
        clipped_positive=int((result.zeroed & positive).sum()),
        negative=int(negative.sum()),
        clipped_negative=int((result.zeroed & negative).sum()),
        kl_clamped=clamped,
        value_loss=value_loss,
        ratio_error=float((ratio - 1).abs().max()) if ratio.numel() else 0.0,
    )


def minibatch_parts(experience: Experience, rows: list[int], size: int) -> Iterator[Experience]:
    """The micro-batches of a minibatch."""
    for start in range(0, len(rows), size):
        yield experience.rows(rows[start : start + size])
