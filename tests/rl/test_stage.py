"""Reinforcement learning: resumable bit for bit, still without signal, loud when something is wrong."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from domain_rewards.runtime import DomainRuntime
from infra.compute.policy import load_policy, policy_hash
from infra.errors import CheckFailed
from rl.config import EvalConfig
from rl.evaluation import evaluate_policy, wilson
from rl.stage import Metrics, RLResult, run_rl
from rl.trainer import Trainer
from tests import toy
from tests.rl.cold import CONFIG, cold_policy


@pytest.fixture(scope="module")
def cold() -> Path:
    return cold_policy()


def train(
    policy: Path, out: Path, metrics: Metrics = toy.ignore, runtime: DomainRuntime | None = None, **changes: Any
) -> RLResult:
    config = CONFIG.model_copy(update=changes)
    tasks = toy.tasks()
    return run_rl(policy, config, tasks[:30], tasks[30:], runtime or toy.runtime(), out, 0, metrics)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_interrupted_training_resumes_bit_for_bit(cold: Path, tmp_path: Path) -> None:
    history: dict[int, dict[str, float]] = {}
    whole = train(cold, tmp_path / "whole", lambda figures, step: history.update({step: figures}))
    assert any(figures.get("rl.updates", 0) > 1 for figures in history.values()), "the toy must carry signal"

    def interrupt(figures: dict[str, float], step: int) -> None:
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(cold, tmp_path / "cut", interrupt)
    again: dict[int, dict[str, float]] = {}
    resumed = train(cold, tmp_path / "cut", lambda figures, step: again.update({step: figures}))
    assert sorted(again) == [5, 6]
    assert all(again[step] == history[step] for step in again)
    assert policy_hash(resumed.policy) == policy_hash(whole.policy)
    assert resumed.metrics == whole.metrics
    changed = weights(whole.policy)
    assert any(not torch.equal(tensor, changed[name]) for name, tensor in weights(cold).items())


def test_engine_and_trainer_agree_about_logprobs(cold: Path, tmp_path: Path) -> None:
    drifts: list[float] = []
    train(cold, tmp_path, lambda figures, step: drifts.append(figures.get("rl.logprob_drift", 0.0)))
    assert 0 < max(drifts) < 1e-5


@pytest.mark.parametrize(
    ("verifier", "told", "fix"),
    [
        (toy.constant, "mean reward of the last step 1.000", "harder tasks"),
        (toy.zero, "mean reward of the last step 0.000", "longer cold start"),
        (toy.crashing, "no episode could be judged", "verifiers' evidence"),
    ],
)
def test_no_signal_stops_the_run_instead_of_registering_the_same_policy(
    cold: Path, tmp_path: Path, verifier: Any, told: str, fix: str
) -> None:
    seen: list[dict[str, float]] = []
    with pytest.raises(CheckFailed, match="no learning signal in 2 steps") as caught:
        train(cold, tmp_path, lambda figures, step: seen.append(figures), toy.runtime(verifier), steps=2)
    assert told in caught.value.what
    assert fix in caught.value.fix
    assert not (tmp_path / "policy").exists()
    assert seen[0]["rl.constant_groups"] == 1.0
    assert ("rl.reward" in seen[0]) == (verifier is not toy.crashing)
    assert seen[0]["rl.unjudged"] == (verifier is toy.crashing)


def test_a_step_without_signal_leaves_the_weights_bit_for_bit(cold: Path) -> None:
    policy = load_policy(cold)
    trainer = Trainer(policy, CONFIG, toy.tasks(), toy.runtime(toy.constant), 0)
    trainer.train_step()
    for name, tensor in weights(cold).items():
        assert torch.equal(tensor, policy.model.state_dict()[name]), name


def test_a_shared_prompt_gives_the_same_update(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    updated = []
    for threshold in (1, 10_000):
        monkeypatch.setattr("infra.compute.scores.SHARED_PROMPT", threshold)
        policy = load_policy(cold)
        figures = Trainer(policy, CONFIG, toy.tasks(), toy.runtime(), 0).train_step()
        assert figures["rl.updates"] >= 1
        updated.append({name: tensor.clone() for name, tensor in policy.model.state_dict().items()})
    for name, tensor in updated[0].items():
        torch.testing.assert_close(tensor, updated[1][name], rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_an_engine_with_stale_weights_stops_the_run(cold: Path) -> None:
    tasks = toy.tasks()
    config = CONFIG.model_copy(update={"learning_rate": 1e-3, "warmup_steps": 0})
    trainer = Trainer(load_policy(cold), config, tasks, toy.runtime(), 0)
    trainer.engine.sync = lambda: None  # type: ignore[method-assign]

    def train_some() -> None:
        for _ in range(6):
            trainer.train_step()

    with pytest.raises(CheckFailed, match="the engine still has the old ones"):
        train_some()
    trainer.engine.checksum = lambda: next(numbers)  # type: ignore[method-assign]
    numbers = itertools.count()
    with pytest.raises(CheckFailed, match="guard drift"):
        train_some()


def test_a_loss_that_is_not_finite_stops_the_run(cold: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match=r"guard (non_finite|kl|drift|drift_k3) stopped|not finite"):
        train(cold, tmp_path, learning_rate=1e30)
    assert not (tmp_path / "policy").exists()


def test_a_policy_with_a_broken_weight_is_never_written(cold: Path, tmp_path: Path) -> None:
    policy = load_policy(cold)
    with torch.no_grad():
        policy.model.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(CheckFailed, match=r"lm_head\.weight"):
        policy.save(tmp_path / "policy", policy.manifest)
    assert not (tmp_path / "policy").exists()
    runtime, config = toy.runtime(), CONFIG
    with pytest.raises(CheckFailed, match=r"is nan|not finite"):
        Trainer(policy, config, toy.tasks(), runtime, 0).train_step()


def test_too_few_tasks_for_the_groups_is_an_error(cold: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match=r"fewer than rl\.groups = 64"):
        train(cold, tmp_path, groups=64)


def test_evaluation_reports_shares_of_what_was_judged(cold: Path) -> None:
    tasks = toy.tasks()
    config = EvalConfig(max_tokens=24, batch_size=7)
    report = evaluate_policy(cold, tasks, toy.runtime(), config, 0, reference=cold)
    assert report.episodes == 40
    assert report.unjudged == 0
    assert report.success is not None
    assert 0 < report.success <= 1
    assert report.success_interval is not None
    assert report.success_interval.low < report.success <= report.success_interval.high
    assert report.thinking_token_ratio is not None
    assert 0 < report.thinking_token_ratio < 1
    assert report.kl_to_reference is not None
    assert abs(report.kl_to_reference) < 1e-8, "a policy is itself"
    assert report == evaluate_policy(cold, tasks, toy.runtime(), config, 0, reference=cold).model_copy(
        update={"mean_seconds": report.mean_seconds}
    )
    nothing = evaluate_policy(cold, tasks[:3], toy.runtime(toy.crashing), config, 0)
    assert (nothing.success, nothing.success_interval, nothing.unjudged) == (None, None, 3)
    assert nothing.unjudged_reasons == {"crashing: RuntimeError: no verdict today": 3}


def test_wilson_interval() -> None:
    interval = wilson(8, 10)
    assert interval.low == pytest.approx(0.4902, abs=1e-4)
    assert interval.high == pytest.approx(0.9433, abs=1e-4)
    assert wilson(0, 5).low == 0.0
