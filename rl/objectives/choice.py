"""From a setting to its objective."""

from __future__ import annotations

from typing import assert_never

from rl.objectives.clip import ClipBounds, dcpo_bounds
from rl.objectives.config import CISPO, DCPO, GMPO, GRPO, GSPO, SAPO, CriticFree
from rl.objectives.grpo import cispo, gmpo, grpo, sapo
from rl.objectives.gspo import gspo
from rl.objectives.terms import ObjectiveResult, PolicyTerms


def policy_loss(terms: PolicyTerms, objective: CriticFree, bounds: ClipBounds) -> ObjectiveResult:
    """The loss that ``objective`` names; ``bounds`` are those of the sequence ratio (``clip.clip_bounds``)."""
    match objective:
        case GSPO():
            return gspo(terms, bounds)
        case GRPO():
            return grpo(terms, objective.low, objective.high, objective.cap)
        case CISPO():
            return cispo(terms, objective.low, objective.high)
        case GMPO():
            return gmpo(terms, objective.log_clip)
        case SAPO():
            return sapo(terms, objective.temperature_positive, objective.temperature_negative)
        case DCPO():
            dynamic = dcpo_bounds(terms.old_logprobs, objective.low, objective.high, objective.cap)
            return grpo(terms, dynamic.low, dynamic.high)
        case _:
            assert_never(objective)
