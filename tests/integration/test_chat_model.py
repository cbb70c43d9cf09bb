"""Any Hugging Face folder goes through the same stages: template, tool format and end tokens come from the model."""

from __future__ import annotations

from pathlib import Path

from infra.compute.config import ModelConfig
from infra.compute.policy import load_policy
from rl.config import EvalConfig, RLConfig
from rl.evaluation import evaluate_policy
from rl.stage import run_rl
from sft.config import SFTConfig
from sft.stage import run_sft
from tests import toy
from tests.infra.models import chat_model_folder


def test_a_chat_model_is_cold_started_trained_evaluated_and_loaded_again(tmp_path: Path) -> None:
    folder = chat_model_folder(tmp_path / "model")
    tasks = toy.tasks(12)
    losses: list[float] = []
    cold = run_sft(
        ModelConfig(path=str(folder)),
        SFTConfig(max_steps=15, batch_size=8, learning_rate=1e-2, max_length=700, warmup_steps=2),
        tasks,
        toy.demonstrations(tasks),
        [],
        toy.runtime(),
        tmp_path / "sft",
        0,
        lambda figures, step: losses.append(figures["sft.loss"]),
    )
    assert losses[-1] < 0.8 * losses[0]
    assert load_policy(cold.policy).manifest.renderer == "chat"
    figures: list[dict[str, float]] = []
    trained = run_rl(
        cold.policy,
        RLConfig(steps=1, groups=2, group_size=2, max_tokens=24, max_turns=2, eval_every=0),
        tasks[:8],
        tasks[8:],
        toy.runtime(toy.alternating),
        tmp_path / "rl",
        0,
        lambda seen, step: figures.append(seen),
    )
    assert figures[0]["rl.tokens"] > 0
    assert figures[0]["rl.updates"] > 0
    assert figures[0]["rl.logprob_drift"] < 1e-4
    config = EvalConfig(max_tokens=16, max_turns=2)
    report = evaluate_policy(trained.policy, tasks[8:], toy.runtime(), config, 0, reference=cold.policy)
    assert report.episodes == 4
    assert report.unjudged == 0
    assert report.kl_to_reference is not None
    assert (trained.policy / "chat_template.jinja").is_file() or load_policy(trained.policy).tokenizer.chat_template
