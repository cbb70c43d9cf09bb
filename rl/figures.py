"""Figures of a step's episodes, for tracking and for the guards; what is not defined is absent."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rl.advantages import Advantages
from rl.objectives.length import repeated_ngrams
from rl.rollout import Rollout
from rl.trajectory import EpisodeEnd

FULL_REWARD = 1 - 1e-6
REPETITIVE_NGRAM, REPETITIVE_SHARE = 3, 0.5
"""An episode repeats itself when more than this share of its n-grams of this size occurred before in it."""


def rollout_figures(rollouts: Sequence[Rollout], advantages: Advantages, group_size: int) -> dict[str, float]:
    """Shares and means over the episodes of a step; rl/guards/README.md defines each."""
    rewards = [r.verdict.reward for r in rollouts]
    judged = [reward for reward in rewards if reward is not None]
    count = len(rollouts)
    sampled = sum(r.trajectory.sampled_tokens for r in rollouts)
    cut = [_truncated(r) for r in rollouts]
    figures = {
        "rl.episodes": float(count),
        "rl.tokens": sampled / count,
        "rl.constant_groups": advantages.constant_groups / advantages.groups,
        "rl.solved_groups": sum(map(_solved, _groups(rewards, group_size))) / advantages.groups,
        "rl.unjudged": (count - len(judged)) / count,
        "rl.truncated": sum(cut) / count,
        "rl.repetitive": sum(map(_repetitive, rollouts)) / count,
        "rl.tool_calls": sum(s.kind == "tool_result" for r in rollouts for s in r.trajectory.segments) / count,
    }
    if sampled:
        figures["rl.thinking_token_ratio"] = sum(r.trajectory.reasoning_tokens for r in rollouts) / sampled
        figures["rl.entropy"] = -sum(sum(r.trajectory.logprobs) for r in rollouts) / sampled
    if judged:
        figures["rl.reward"] = sum(judged) / len(judged)
    if not all(cut):
        whole = [r.trajectory.sampled_tokens for r, was_cut in zip(rollouts, cut, strict=True) if not was_cut]
        figures["rl.tokens_untruncated"] = sum(whole) / len(whole)
    for rollout in rollouts:
        for verifier in rollout.verdict.evidence:
            name = f"rl.unjudged.{re.sub(r'[^A-Za-z0-9_.-]', '_', verifier)}"
            figures[name] = figures.get(name, 0.0) + 1
    return figures


def sampled_ids(rollout: Rollout) -> list[int]:
    """The tokens that the policy sampled, tool results left out."""
    trajectory = rollout.trajectory
    return [token for token, mask in zip(trajectory.ids, trajectory.mask, strict=True) if mask]


def _groups(rewards: Sequence[float | None], size: int) -> list[Sequence[float | None]]:
    return [rewards[start : start + size] for start in range(0, len(rewards), size)]


def _solved(rewards: Sequence[float | None]) -> bool:
    judged = [reward for reward in rewards if reward is not None]
    return bool(judged) and min(judged) >= FULL_REWARD


def _truncated(rollout: Rollout) -> bool:
    return rollout.trajectory.end is EpisodeEnd.LENGTH


def _repetitive(rollout: Rollout) -> bool:
    return repeated_ngrams(sampled_ids(rollout), REPETITIVE_NGRAM) > REPETITIVE_SHARE
