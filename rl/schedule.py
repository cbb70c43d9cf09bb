"""The learning rate over a run."""

from __future__ import annotations

import math

from rl.config import RLConfig


def learning_rate(config: RLConfig, step: int) -> float:
    """The rate of step ``0 … steps - 1``: a function of the step alone, so a resume cannot lose its place.

    Linear warm-up over ``warmup_steps``, against a fall from ``learning_rate`` to ``final_learning_rate`` of it over
    the whole run (``linear``, ``cosine``) or none (``constant``); the lower of the two counts.
    """
    warmup = (step + 1) / config.warmup_steps if config.warmup_steps else 1.0
    progress = step / config.steps
    if config.schedule == "constant":
        height = 1.0
    elif config.schedule == "cosine":
        height = (1 + math.cos(math.pi * progress)) / 2
    else:
        height = 1 - progress
    fall = config.final_learning_rate + (1 - config.final_learning_rate) * height
    return config.learning_rate * min(warmup, fall)
