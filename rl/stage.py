"""The reinforcement-learning stage: from a cold-started policy to the best one on dev."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_contracts.records import Task
from domain_rewards.runtime import DomainRuntime
from infra.compute.checkpoint import load_checkpoint, save_checkpoint
from infra.compute.policy import PolicyManifest, load_policy, policy_hash
from infra.telemetry import logger, progress
from rl.config import EvalConfig, RLConfig
from rl.evaluation import play_all, summarise
from rl.trainer import Trainer

Metrics = Callable[[dict[str, float], int], None]


@dataclass(frozen=True)
class RLResult:
    """The policy folder and what was measured on dev."""

    policy: Path
    metrics: dict[str, float]


def run_rl(
    policy: Path,
    config: RLConfig,
    tasks: Sequence[Task],
    dev_tasks: Sequence[Task],
    runtime: DomainRuntime,
    out: Path,
    seed: int,
    metrics: Metrics,
) -> RLResult:
    """Train from ``policy`` and write ``out/policy``: the weights with the best greedy success on dev.

    Args:
        out: the stage's folder; a checkpoint in it is resumed, bit for bit.
        metrics: called with ``(figures, step)``.

    Raises:
        CheckFailed: a guard stopped the run; the last checkpoint and ``policy`` are kept.
    """
    loaded = load_policy(policy)
    trainer = Trainer(loaded, config, tasks, runtime, seed)
    checkpoint = out / "checkpoint.pt"
    best: dict[str, object] = {}
    best_success = -1.0
    state = load_checkpoint(checkpoint)
    if state is not None:
        trainer.load_state(state["trainer"])
        best, best_success = state["best"], state["best_success"]
        logger.info("rl: resumed at step %d", trainer.step)
    evaluation = EvalConfig(max_tokens=config.max_tokens, max_turns=config.max_turns)
    with progress("rl", config.steps, trainer.step) as bar:
        while trainer.step < config.steps:
            figures = trainer.train_step()
            last = trainer.step == config.steps
            if last or (config.eval_every and trainer.step % config.eval_every == 0):
                loaded.model.eval()
                report = summarise(
                    play_all(trainer.engine, loaded, dev_tasks, runtime, evaluation, 0.0, seed), None, None
                )
                success = -1.0 if report.success is None else report.success
                figures["rl.dev_success"] = success
                if success >= best_success:
                    best, best_success = copy.deepcopy(loaded.model.state_dict()), success
            metrics(figures, trainer.step)
            bar.advance(1, **{name: figures[f"rl.{name}"] for name in ("reward", "entropy") if f"rl.{name}" in figures})
            if trainer.step % config.checkpoint_every == 0 and not last:
                save_checkpoint(checkpoint, {"trainer": trainer.state(), "best": best, "best_success": best_success})
    loaded.model.load_state_dict(best)
    result = {"rl.steps": float(trainer.step), "rl.dev_success": best_success}
    manifest = PolicyManifest(renderer=loaded.manifest.renderer, stage="rl", parent=policy_hash(policy), metrics=result)
    loaded.save(out / "policy", manifest)
    return RLResult(out / "policy", result)
