"""The cold-start stage: from demonstrations to the first policy."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_contracts.records import Demonstration, Task
from domain_rewards.runtime import DomainRuntime
from infra.compute.checkpoint import load_checkpoint, save_checkpoint
from infra.compute.config import ModelConfig
from infra.compute.logprobs import pad_sequences, token_logprobs
from infra.compute.policy import LoadedPolicy, PolicyManifest, build_policy
from infra.errors import CheckFailed
from infra.seeds import generator
from infra.telemetry import logger, progress
from sft.config import Reliability, SFTConfig
from sft.data import Example, Mixture, branch_points, render_examples

Metrics = Callable[[dict[str, float], int], None]


@dataclass(frozen=True)
class SFTResult:
    """The policy folder and what was measured on the dev demonstrations."""

    policy: Path
    metrics: dict[str, float]


def run_sft(
    model: ModelConfig,
    config: SFTConfig,
    tasks: Sequence[Task],
    demonstrations: Sequence[Demonstration],
    dev_demonstrations: Sequence[Demonstration],
    runtime: DomainRuntime,
    out: Path,
    seed: int,
    metrics: Metrics,
) -> SFTResult:
    """Train on demonstrations and write ``out/policy``.

    Args:
        tasks: train and dev tasks (the demonstrations name them).
        out: the stage's folder; a checkpoint in it is resumed, bit for bit.
        metrics: called with ``(figures, step)``.

    Raises:
        CheckFailed: nothing to learn from, a demonstration too long, or the loss is not finite.
    """
    by_id = {task.task_id: task for task in tasks}
    policy = build_policy(model, _corpus(by_id, demonstrations), seed)

    def render(items: Sequence[Demonstration]) -> list[Example]:
        return render_examples(by_id, items, runtime.environment, policy.renderer, config.max_length)

    trainer = _ColdStart(
        policy, config, Mixture(render(demonstrations), config.mixture), render(dev_demonstrations), seed
    )
    trainer.resume(out / "checkpoint.pt")
    trainer.train(out / "checkpoint.pt", metrics)
    figures = trainer.figures()
    policy.save(out / "policy", PolicyManifest(renderer=policy.manifest.renderer, stage="sft", metrics=figures))
    return SFTResult(out / "policy", figures)


def _corpus(tasks: Mapping[str, Task], demonstrations: Sequence[Demonstration]) -> list[str]:
    """Every text the preset's tokenizer should know: prompts, thinking, tool names and arguments, results, answers."""
    texts = [tasks[demonstration.task_id].prompt for demonstration in demonstrations]
    for demonstration in demonstrations:
        for message in demonstration.messages:
            texts += [text for text in (message.thinking, message.content) if text]
            for call in message.tool_calls:
                texts += [call.name, call.arguments]
    return texts


class _ColdStart:
    """AdamW on the mean log-prob of the trained tokens; learning rate constant, then decayed to the end."""

    def __init__(
        self, policy: LoadedPolicy, config: SFTConfig, mixture: Mixture, dev: Sequence[Example], seed: int
    ) -> None:
        import torch

        self.policy, self.config, self.mixture, self.dev, self.seed = policy, config, mixture, dev, seed
        self.optimizer = torch.optim.AdamW(
            policy.model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=config.weight_decay
        )
        self.step = 0
        self.end = config.max_steps
        self.opened = False

    def train(self, checkpoint: Path, metrics: Metrics) -> None:
        """Run to ``self.end``, which moves forward once the reliability measure is reached."""
        until = self.config.until
        with progress("cold start", self.end, self.step) as bar:
            while self.step < self.end:
                loss = self._update()
                self.step += 1
                shown = {"loss": loss}
                if until is not None and self.step % until.every == 0:
                    shown["reliability"] = self._measure(until, until.source)
                    if not self.opened and shown["reliability"] >= until.min:
                        self.opened = True
                        self.end = min(self.config.max_steps, self.step + until.cooldown)
                        logger.info("cold start: %s is reliable, ends at step %d", until.source, self.end)
                metrics({f"sft.{name}": value for name, value in shown.items()}, self.step)
                bar.advance(1, **shown)
                if self.step % self.config.checkpoint_every == 0:
                    save_checkpoint(checkpoint, self._state())

    def figures(self) -> dict[str, float]:
        """Steps taken and, per demonstration source, its reliability on dev."""
        figures = {"sft.steps": float(self.step), "sft.opened": float(self.opened)}
        for source in sorted({example.source for example in self.dev}):
            measure = self.config.until or Reliability(source=source, min=0.5)
            figures[f"sft.reliability.{source}"] = self._measure(measure, source)
        return figures

    def resume(self, checkpoint: Path) -> None:
        """Continue from a checkpoint of the same stage, if there is one."""
        state = load_checkpoint(checkpoint)
        if state is None:
            return
        self.policy.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.end, self.opened = state["step"], state["end"], state["opened"]
        logger.info("cold start: resumed at step %d", self.step)

    def _state(self) -> dict[str, Any]:
        return {
            "model": self.policy.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "end": self.end,
            "opened": self.opened,
        }

    def _update(self) -> float:
        import torch

        config, model = self.config, self.policy.model
        model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate * self._learning_rate_factor()
        examples = self.mixture.draw(config.batch_size, generator(self.seed, "sft", self.step))
        batch = self._batch(examples)
        loss = -(token_logprobs(model, batch) * batch.mask).sum() / batch.mask.sum()
        if not bool(torch.isfinite(loss)):
            raise CheckFailed(
                f"the cold-start loss is {loss.item()} at step {self.step}",
                where="stage sft",
                fix="lower sft.learning_rate or check the demonstrations; the last checkpoint is kept",
            )
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        self.optimizer.step()
        return float(loss.detach())

    def _learning_rate_factor(self) -> float:
        config = self.config
        warmup = (self.step + 1) / config.warmup_steps if config.warmup_steps else 1.0
        cooldown = config.until.cooldown if config.until else max(1, config.max_steps // 3)
        decay = max(config.final_learning_rate, (self.end - self.step) / cooldown)
        return min(1.0, warmup, decay)

    def _measure(self, until: Reliability, source: str) -> float:
        """Mean over dev of P(all trained tokens of ``source``'s path right | path entered), teacher-forced."""
        import torch

        points = branch_points(self.dev, source)
        if not points:
            raise CheckFailed(
                f"no dev demonstration by {until.source!r}, so its reliability cannot be measured",
                where="domain.yaml, sft.until.source",
                fix="name a source that demonstrates dev tasks, or widen data.splits.dev",
            )
        self.policy.model.eval()
        total = 0.0
        with torch.no_grad():
            for start in range(0, len(points), 128):
                chunk = points[start : start + 128]
                batch = self._batch([example for example, _ in chunk])
                logprobs = token_logprobs(self.policy.model, batch) * batch.mask
                for row, (example, branch) in enumerate(chunk):
                    if branch is not None:
                        logprobs[row, len(example.tokens.prompt) + branch - 1] = 0.0
                total += float(logprobs.sum(1).exp().sum())
        return total / len(points)

    def _batch(self, examples: Sequence[Example]) -> Any:
        tokens = [example.tokens for example in examples]
        pad = self.policy.tokenizer.pad_token_id
        return pad_sequences([t.prompt for t in tokens], [t.ids for t in tokens], [t.mask for t in tokens], pad or 0)


def discard_checkpoints(out: Path) -> None:
    """Remove what only a resume would need, once the stage is recorded as finished."""
    for name in ("checkpoint.pt", "checkpoint.pt.partial", "checkpoints", "policy.partial"):
        path = out / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
