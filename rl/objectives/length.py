"""Length and repetition: soft overlong penalty, truncation mask, repeated n-grams, runs of certainty."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from rl.advantages import Advantages
from rl.objectives.config import LengthConfig

LONGEST_WINDOW = 3000
"""Tokens in a row, each almost certain, after which MiniMax-M1 (arXiv 2506.13585) ends a generation."""


def soft_overlong_penalty(length: int, max_length: int, cache: int) -> float:
    """DAPO's punishment of long answers, in [-1, 0] (arXiv 2503.14476, eq. 13).

    0 up to ``max_length - cache``, falling linearly to -1 at ``max_length``, and -1 beyond: with a floor, unlike
    the formula found in verl.

    Raises:
        ValueError: ``cache`` is not in ``1 … max_length``.
    """
    if not 1 <= cache <= max_length:
        raise ValueError(f"cache must lie in 1 … {max_length}, not {cache}")
    return max(-1.0, min(0.0, (max_length - cache - length) / cache))


def mask_truncated(advantages: Advantages, truncated: Sequence[bool]) -> Advantages:
    """Truncated episodes leave loss and normaliser, but their rewards stay in their group's baseline.

    (To keep them out of the baseline as well, give their reward as None.)
    """
    keep = [kept and not cut for kept, cut in zip(advantages.keep, truncated, strict=True)]
    values = [value if kept else 0.0 for value, kept in zip(advantages.values, keep, strict=True)]
    return replace(advantages, values=values, keep=keep)


def repeated_ngrams(ids: Sequence[int], size: int) -> float:
    """Share of n-grams that repeat an earlier one, ``1 - unique / all``; 0 where there is none."""
    grams = [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def shaped_reward(reward: float | None, ids: Sequence[int], max_length: int, config: LengthConfig) -> float | None:
    """The reward after penalties for length and repetition; None (not judged) stays None.

    Args:
        ids: the tokens that the policy sampled, tool results left out.
        max_length: most tokens that the policy may sample.
    """
    if reward is None:
        return None
    share = repeated_ngrams(ids, config.ngram)
    if config.overlong_cache is not None:
        reward += config.overlong_penalty * soft_overlong_penalty(len(ids), max_length, config.overlong_cache)
    reward -= config.ngram_penalty * share
    if config.ngram_limit is not None and share > config.ngram_limit:
        reward = min(reward, 0.0)
    return reward


def run_window(max_length: int) -> int:
    """The window for :class:`RepetitionStop`: ``min(3000, max_length / 8)``, at least 1."""
    return max(1, min(LONGEST_WINDOW, max_length // 8))


class RepetitionStop:
    """Says when to end a generation: ``window`` sampled tokens in a row, each with a probability over ``threshold``.

    A policy that is stuck in a loop is sure of every token of it. So is one that writes out a long fixed format: the
    window must be longer than the longest stretch that a healthy answer is sure of.
    """

    def __init__(self, window: int, threshold: float = 0.99) -> None:
        self.window, self.limit = window, math.log(threshold)
        self.run = self.longest = 0

    def feed(self, logprob: float) -> bool:
        """Count one more sampled token; True = stop here. NaN breaks the run."""
        self.run = self.run + 1 if logprob > self.limit else 0
        self.longest = max(self.longest, self.run)
        return self.run >= self.window
