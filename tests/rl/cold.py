"""A policy of the toy domain that gets some tasks right, made once per test process."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from rl.config import RLConfig
from sft.config import SFTConfig
from sft.stage import run_sft
from tests import toy

CONFIG = RLConfig.model_validate(
    {
        "steps": 6,
        "groups": 4,
        "group_size": 4,
        "minibatch": 8,
        "microbatch": 4,
        "learning_rate": 1e-3,
        "clip": {"low": 0.03, "high": 0.04, "modulation_high": 0},
        "aggregation": "gspo",
        "normalise_std": True,
        "max_tokens": 24,
        "eval_every": 2,
        "checkpoint_every": 2,
        # Fifty thousand parameters move further from their reference than a large model may.
        "guards": {"kl": {"warn": 1, "stop": 4}, "parameters": {"action": "warn"}},
    }
)


@cache
def cold_policy() -> Path:
    """Its folder; nobody writes to it."""
    tasks = toy.tasks()
    config = SFTConfig(max_steps=150, batch_size=16)
    out = Path(tempfile.mkdtemp(prefix="senmon-cold-"))
    return run_sft(toy.MODEL, config, tasks, toy.demonstrations(tasks), [], toy.runtime(), out, 0, toy.ignore).policy
