"""The cold start: resumable bit for bit, ended by reliability, and loud about data it cannot learn from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from infra.compute.policy import load_policy, policy_hash
from infra.errors import CheckFailed
from sft.config import Reliability, SFTConfig
from sft.data import branch_points, render_examples
from sft.stage import Metrics, SFTResult, run_sft
from tests import toy

CONFIG = SFTConfig(max_steps=12, batch_size=8, checkpoint_every=4, warmup_steps=2)


def train(out: Path, config: SFTConfig = CONFIG, metrics: Metrics = toy.ignore, seed: int = 0) -> SFTResult:
    tasks = toy.tasks()
    demonstrations = toy.demonstrations(tasks)
    return run_sft(
        toy.MODEL, config, tasks, demonstrations[:60], demonstrations[60:], toy.runtime(), out, seed, metrics
    )


def weights(result: SFTResult) -> dict[str, torch.Tensor]:
    return load_file(result.policy / "model.safetensors")


def test_an_interrupted_cold_start_resumes_bit_for_bit(tmp_path: Path) -> None:
    losses: dict[int, float] = {}
    whole = train(tmp_path / "whole", metrics=lambda figures, step: losses.update({step: figures["sft.loss"]}))

    def interrupt(figures: dict[str, float], step: int) -> None:
        assert figures["sft.loss"] == losses[step]
        if step == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", metrics=interrupt)
    assert not (tmp_path / "cut" / "policy").exists()
    resumed_at: list[int] = []

    def compare(figures: dict[str, float], step: int) -> None:
        resumed_at.append(step)
        assert figures["sft.loss"] == losses[step]

    resumed = train(tmp_path / "cut", metrics=compare)
    assert resumed_at == [9, 10, 11, 12]
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(resumed)[name]), name
    assert policy_hash(whole.policy) == policy_hash(resumed.policy)


def test_another_seed_gives_another_policy(tmp_path: Path) -> None:
    assert policy_hash(train(tmp_path / "a").policy) != policy_hash(train(tmp_path / "b", seed=1).policy)


def test_reliability_ends_the_cold_start(tmp_path: Path) -> None:
    until = Reliability(source="tool", min=1e-4, every=5, cooldown=10)
    config = CONFIG.model_copy(update={"max_steps": 200, "until": until, "mixture": {"tool": 1.0}})
    seen: list[tuple[int, float]] = []
    result = train(
        tmp_path, config, lambda figures, step: seen.append((step, figures.get("sft.reliability", float("nan"))))
    )
    opened = next(step for step, value in seen if value >= 1e-4)
    assert result.metrics["sft.steps"] == opened + 10 < 200
    assert result.metrics["sft.opened"] == 1.0
    assert result.metrics["sft.reliability.tool"] >= 1e-4
    assert load_policy(result.policy).manifest.stage == "sft"


def test_paths_part_where_the_sources_differ() -> None:
    from infra.compute.policy import build_policy

    tasks = toy.tasks(3)
    demonstrations = toy.demonstrations(tasks)
    policy = build_policy(toy.MODEL, [task.prompt for task in tasks], 0)
    examples = render_examples(
        {task.task_id: task for task in tasks}, demonstrations, toy.Doubling, policy.renderer, 64
    )
    for example, branch in branch_points(examples, "tool"):
        head = next(e for e in examples if e.task_id == example.task_id and e.source == "head")
        assert branch is not None
        assert example.tokens.ids[:branch] == head.tokens.ids[:branch]
        assert example.tokens.ids[branch] != head.tokens.ids[branch]
    alone = [example for example in examples if example.source == "tool"]
    assert [branch for _, branch in branch_points(alone, "tool")] == [None] * 3


def test_a_demonstration_that_does_not_fit_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match=r"more than sft\.max_length = 9") as caught:
        train(tmp_path, CONFIG.model_copy(update={"max_length": 9}))
    assert "task t0 by tool" in str(caught.value)


def test_a_mixture_of_unknown_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match="sources without demonstrations: teacher"):
        train(tmp_path, CONFIG.model_copy(update={"mixture": {"teacher": 1.0}}))


def test_no_demonstrations_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match="no demonstration to learn from"):
        run_sft(toy.MODEL, CONFIG, toy.tasks(), [], [], toy.runtime(), tmp_path, 0, toy.ignore)


def test_a_loss_that_is_not_finite_stops_the_stage_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"learning_rate": 1e30, "checkpoint_every": 1})
    with pytest.raises(CheckFailed, match=r"loss is (nan|inf)") as caught:
        train(tmp_path, config)
    assert "sft.learning_rate" in caught.value.fix
    assert not (tmp_path / "policy").exists()


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(b"PK\x03\x04 half a file")
    with pytest.raises(CheckFailed, match="checkpoint is damaged"):
        train(tmp_path)
