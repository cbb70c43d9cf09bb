"""The reinforcement-learning stage: from a cold-started policy to the best one on dev."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from data_contracts.records import Task
from domain_rewards.runtime import DomainRuntime
from infra.compute.checkpoint import CheckpointStore
from infra.compute.policy import PolicyManifest, load_policy, policy_hash
from infra.telemetry import logger, progress
from rl.config import EvalConfig, RLConfig
from rl.evaluation import play_all, summarise
from rl.rollout import Rollout
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
    """Train from ``policy`` and write ``out/policy``: the weights with the best greedy success on dev (``keep``).

    Args:
        out: the stage's folder; the newest whole checkpoint in it is resumed, bit for bit.
        metrics: called with ``(figures, step)``.

    Raises:
        CheckFailed: a guard stopped the run; the last checkpoint and ``policy`` are kept.
    """
    loaded = load_policy(policy)
    trainer = Trainer(loaded, config, tasks, runtime, seed)
    store = CheckpointStore(out / "checkpoints", config.keep_checkpoints)
    chosen: dict[str, Tensor] = {}
    best_success = -1.0
    found = store.newest()
    if found is not None:
        _, state = found
        trainer.load_state(state["trainer"])
        chosen, best_success = state["chosen"], state["best_success"]
        logger.info("rl: resumed at step %d", trainer.step)
    evaluation = EvalConfig(max_tokens=config.max_tokens, max_turns=config.max_turns)
    with progress("rl", config.steps, trainer.step) as bar:
        while trainer.step < config.steps:
            figures = trainer.train_step()
            last = trainer.step == config.steps
            if last or (config.eval_every and trainer.step % config.eval_every == 0):
                with trainer.learner.averaged():
                    success = _success(play_all(trainer.engine, loaded, dev_tasks, runtime, evaluation, 0.0, seed))
                    better = success >= best_success if config.keep == "best" else last
                    if better:
                        chosen, best_success = trainer.learner.served_state(), success
                figures["rl.dev_success"] = success
            metrics(figures, trainer.step)
            bar.advance(1, **{name: figures[f"rl.{name}"] for name in ("reward", "entropy") if f"rl.{name}" in figures})
            if trainer.step % config.checkpoint_every == 0 and not last:
                state = {"trainer": trainer.state(), "chosen": chosen, "best_success": best_success}
                store.save(trainer.step, state)
    trainer.learner.served.load_state_dict(chosen)
    result = {"rl.steps": float(trainer.step), "rl.dev_success": best_success, "rl.alarms": float(trainer.alarms)}
    manifest = PolicyManifest(renderer=loaded.manifest.renderer, stage="rl", parent=policy_hash(policy), metrics=result)
    loaded.save(out / "policy", manifest)
    return RLResult(out / "policy", result)


def _success(rollouts: Sequence[Rollout]) -> float:
    """Share of full rewards; -1, worse than any, where nothing could be judged."""
    success = summarise(rollouts, None, None).success
    return -1.0 if success is None else success
