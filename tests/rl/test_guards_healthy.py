"""Guards stay silent over healthy runs, recorded in tests/rl/data, and hear it when one figure of these goes wrong.

The files hold every step of real runs of the trainer: five seeds of each bundled domain with its domain.yaml
(``python -m tests.evidence.seeds``), and two of the domain in tests/toy.py. ``rl.grad_norm_max`` is the largest
gradient norm of a step's updates.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelines.spec import load_domain
from rl.guards import Alarm, GuardConfig, GuardPanel

DATA = Path(__file__).parent / "data"
CONFIGS: dict[str, dict[str, Any]] = {
    "invoice_approval": load_domain("invoice_approval").spec.rl.guards.model_dump(),
    "arithmetic": load_domain("arithmetic").spec.rl.guards.model_dump(),
    # Fifty thousand parameters move further from their reference than a large model may.
    "toy": {"kl": {"warn": 0.5, "stop": 2}},
}
Run = list[dict[str, float | None]]


def recorded(domain: str) -> dict[str, Run]:
    """Steps of each seed's run."""
    runs: dict[str, dict[str, list[float | None]]] = json.loads((DATA / f"healthy_{domain}.json").read_text())
    return {
        seed: [dict(zip(series, values, strict=True)) for values in zip(*series.values(), strict=True)]
        for seed, series in runs.items()
    }


RUNS = [
    pytest.param(domain, run, id=f"{domain}-{seed}") for domain in CONFIGS for seed, run in recorded(domain).items()
]


def watched(domain: str, run: Run) -> Iterator[Alarm]:
    """Everything the guards say about a run."""
    panel = GuardPanel(GuardConfig.model_validate(CONFIGS[domain]))
    for step, figures in enumerate(run, start=1):
        norm = figures["rl.grad_norm_max"]
        if norm is not None:
            yield from panel.before_update(step, norm, {"rl.loss": figures["rl.loss"]})
        yield from panel.observe(step, figures)


@pytest.mark.parametrize(("domain", "run"), RUNS)
def test_guards_are_silent_over_a_healthy_run(domain: str, run: Run):
    assert list(watched(domain, run)) == []


def test_the_recorded_runs_are_whole_and_learn():
    for domain in CONFIGS:
        runs = recorded(domain)
        assert len(runs) == (2 if domain == "toy" else 5)
        for run in runs.values():
            rewards = [figures["rl.reward"] or 0.0 for figures in run]
            assert len(rewards) >= 40
            assert sum(rewards[-10:]) > sum(rewards[:5]) * 2 * 1.1


SPOILED = {
    "kl": {"rl.kl_to_reference": 3.0},
    "drift_k3": {"rl.logprob_drift_k3": 5e-3},
    "drift": {"rl.logprob_drift": 0.1},
    "on_policy_ratio": {"rl.on_policy_ratio_error": 1e-3},
    "stale_weights": {"rl.weight_lag": 1.0},
    "entropy": {"rl.entropy": 1e-4, "rl.reward": 0.3},
    "clip_asymmetry": {"rl.clip_fraction_positive": 0.0, "rl.clip_fraction_negative": 0.9},
    "zero_signal": {"rl.constant_groups": 1.0, "rl.solved_groups": 0.5},
    "constant_reward": {"rl.reward": 0.0, "rl.constant_groups": 1.0},
    "length": {"rl.tokens": 500.0, "rl.reward": 0.3},
    "thinking_ratio": {"rl.thinking_token_ratio": 0.0},
    "repetition": {"rl.repetitive": 0.3},
    "gradient": {"rl.grad_norm": 50.0, "rl.grad_norm_max": 50.0},
    "truncated": {"rl.truncated": 1.0},
    "unjudged": {"rl.unjudged": 0.2},
    "non_finite": {"rl.loss": float("nan")},
}


@pytest.mark.parametrize("guard", SPOILED)
@pytest.mark.parametrize(("domain", "run"), RUNS)
def test_one_figure_gone_wrong_late_in_a_healthy_run_is_heard(domain: str, run: Run, guard: str):
    spoiled = [figures | SPOILED[guard] if step >= 25 else figures for step, figures in enumerate(run)]
    assert guard in {alarm.guard for alarm in watched(domain, spoiled)}
