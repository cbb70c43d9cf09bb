"""One policy, updated on its own episodes: rollout, advantages, objective, optimizer step."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from data_contracts.records import Task
from domain_rewards.runtime import DomainRuntime
from infra.compute.attention.shared_prefix import supports
from infra.compute.logprobs import TokenBatch, align, pad_sequences, token_logprobs
from infra.compute.packing import grouped_logprobs
from infra.compute.policy import LoadedPolicy
from infra.errors import CheckFailed
from infra.inference.embedded.engine import EmbeddedEngine
from infra.seeds import derive_seed, generator
from rl.advantages import Advantages, group_advantages
from rl.config import RLConfig
from rl.objectives.aggregation import Normaliser, token_weights
from rl.objectives.clip import clip_bounds
from rl.objectives.gspo import PolicyTerms, gspo
from rl.rollout import EpisodeRequest, Rollout, RolloutSettings, play

MAX_DRIFT = 1e-2
"""Mean |log-prob difference| between engine and trainer, in nats, above which training stops: a hundred times
what float32 rounding gives."""


NO_SIGNAL_STEPS = 10
"""Steps without a single update after which training stops: it would register an unchanged policy."""
SHARED_PROMPT = 32
"""Tokens from which on a group's prompt is computed once in training; below, a padded batch is as fast."""


@dataclass(frozen=True)
class Experience:
    """Episodes of one step that carry signal; columns as in ``TokenBatch``, one row per episode."""

    prompts: Sequence[Sequence[int]]
    completions: Sequence[Sequence[int]]
    batch: TokenBatch
    old_logprobs: Tensor
    advantages: Tensor
    group_rms: Tensor

    def rows(self, indices: Sequence[int]) -> Experience:
        """Some of the episodes, cut to the longest of them."""
        at = torch.tensor(indices)
        width = int(self.batch.attention[at].sum(1).max())
        batch = TokenBatch(
            self.batch.ids[at, :width], self.batch.attention[at, :width], self.batch.mask[at, : width - 1]
        )
        return Experience(
            [self.prompts[i] for i in indices],
            [self.completions[i] for i in indices],
            batch,
            self.old_logprobs[at, : width - 1],
            self.advantages[at],
            self.group_rms[at],
        )


class Trainer:
    """Runs steps. Its whole state is weights, optimizer and step number: every random draw is addressed by step."""

    def __init__(
        self, policy: LoadedPolicy, config: RLConfig, tasks: Sequence[Task], runtime: DomainRuntime, seed: int
    ) -> None:
        self.policy, self.config, self.tasks, self.runtime, self.seed = policy, config, tasks, runtime, seed
        self.step = 0
        self.updates = 0
        self.engine = EmbeddedEngine(policy.model)
        self.optimizer = torch.optim.AdamW(
            policy.model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=config.weight_decay
        )
        if len(tasks) < config.groups:
            raise CheckFailed(
                f"{len(tasks)} training tasks are fewer than rl.groups = {config.groups}",
                where="domain.yaml, rl.groups",
                fix="lower rl.groups or provide more tasks",
            )

    def state(self) -> dict[str, Any]:
        """Everything a resume needs."""
        return {
            "model": self.policy.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "updates": self.updates,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state`, bit for bit."""
        self.policy.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.updates = state["step"], state["updates"]
        self.engine.sync()

    def train_step(self) -> dict[str, float]:
        """Sample, judge, update; the figures of the step.

        Raises:
            CheckFailed: the loss is not finite, engine and trainer disagree about log-probs, or nothing was learnt
                from so far.
        """
        rollouts = self._sample()
        if not all(math.isfinite(x) for rollout in rollouts for x in rollout.trajectory.logprobs):
            self._stop("the policy samples with log-probs that are not finite: its weights are broken")
        advantages = group_advantages(
            [r.verdict.reward for r in rollouts], self.config.group_size, self.config.normalise_std
        )
        figures = _rollout_figures(rollouts, advantages)
        kept = [i for i, keep in enumerate(advantages.keep) if keep]
        if kept:
            figures |= self._update(self._experience(rollouts, advantages, kept))
            self.engine.sync()
        self.step += 1
        if not self.updates and self.step == min(NO_SIGNAL_STEPS, self.config.steps):
            self._stop_without_signal(figures.get("rl.reward"))
        return figures

    def learning_rate(self) -> float:
        """Linear warm-up, then linear decay to ``final_learning_rate`` of the peak at the last step."""
        config = self.config
        warmup = (self.step + 1) / config.warmup_steps if config.warmup_steps else 1.0
        decay = 1 - (1 - config.final_learning_rate) * self.step / config.steps
        return config.learning_rate * min(warmup, decay)

    def _sample(self) -> list[Rollout]:
        config = self.config
        chosen = generator(self.seed, "tasks", self.step).sample(range(len(self.tasks)), config.groups)
        requests = [
            EpisodeRequest(self.tasks[index], derive_seed(self.seed, "rollout", self.step, index, sample))
            for index in chosen
            for sample in range(config.group_size)
        ]
        self.policy.model.eval()
        settings = RolloutSettings(config.max_tokens, config.max_turns, config.temperature)
        return asyncio.run(play(self.engine, self.policy.renderer, self.runtime, requests, settings))

    def _experience(self, rollouts: Sequence[Rollout], advantages: Advantages, kept: Sequence[int]) -> Experience:
        chosen = [rollouts[i].trajectory for i in kept]
        prompts = [t.prompt for t in chosen]
        pad = self.policy.tokenizer.pad_token_id or 0
        batch = pad_sequences(prompts, [t.ids for t in chosen], [t.mask for t in chosen], pad)
        old = align(prompts, [t.logprobs for t in chosen], batch.ids.shape[1])
        values = torch.tensor([advantages.values[i] for i in kept])
        rms = torch.tensor([advantages.rms[i] for i in kept])
        return Experience(prompts, [t.ids for t in chosen], batch, old, values, rms)

    def _update(self, experience: Experience) -> dict[str, float]:
        """``epochs`` passes in minibatches; one optimizer step per minibatch."""
        config, model = self.config, self.policy.model
        model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        count = experience.advantages.shape[0]
        sums: dict[str, float] = {}
        updates = 0
        for epoch in range(config.epochs):
            order = list(range(count))
            generator(self.seed, "minibatch", self.step, epoch).shuffle(order)
            for start in range(0, count, config.minibatch):
                figures = self._minibatch(experience, order[start : start + config.minibatch], first=updates == 0)
                updates += 1
                self.updates += 1
                for name, value in figures.items():
                    sums[name] = sums.get(name, 0.0) + value
        drift = sums.pop("rl.logprob_drift")
        return {name: value / updates for name, value in sums.items()} | {
            "rl.logprob_drift": drift,
            "rl.updates": float(updates),
            "rl.learning_rate": self.learning_rate(),
        }

    def _minibatch(self, experience: Experience, rows: Sequence[int], first: bool) -> dict[str, float]:
        config, model = self.config, self.policy.model
        mask = experience.batch.mask[torch.tensor(rows)]
        # A short minibatch (the rest of a pass) keeps the weight per sequence that a full one has.
        sequences = max(len(rows), config.minibatch)
        normaliser = Normaliser(sequences, int(mask.sum()), config.max_tokens)
        self.optimizer.zero_grad()
        figures = {"rl.loss": 0.0, "rl.clip_fraction": 0.0, "rl.ratio_outside": 0.0, "rl.logprob_drift": 0.0}
        tokens = float(mask.sum())
        for start in range(0, len(rows), config.microbatch):
            part = experience.rows(rows[start : start + config.microbatch])
            logprobs = self._logprobs(part)
            if first:
                drift = ((logprobs.detach() - part.old_logprobs).abs() * part.batch.mask).sum()
                figures["rl.logprob_drift"] += float(drift) / tokens
            weights = token_weights(part.batch.mask, config.aggregation, normaliser)
            spread = part.advantages[:, None].expand_as(logprobs)
            terms = PolicyTerms(logprobs, part.old_logprobs, part.batch.mask, spread, weights)
            result = gspo(terms, clip_bounds(part.advantages, part.group_rms, config.clip))
            torch.autograd.backward(result.loss)
            figures["rl.loss"] += float(result.loss.detach())
            figures["rl.clip_fraction"] += float(result.zeroed.sum()) / tokens
            figures["rl.ratio_outside"] += float(result.outside.sum()) / tokens
        self._check(figures)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        figures["rl.grad_norm"] = float(norm)
        if not math.isfinite(figures["rl.grad_norm"]):
            self._stop(f"the gradient norm is {figures['rl.grad_norm']}")
        self.optimizer.step()
        return figures

    def _logprobs(self, part: Experience) -> Tensor:
        """Log-probs ``[sequences, length - 1]``: shared prompts once where they are long enough to matter."""
        temperature = self.config.temperature
        shortest = min(map(len, part.prompts))
        if supports(self.policy.model) and shortest >= SHARED_PROMPT:
            width = part.batch.ids.shape[1]
            return grouped_logprobs(self.policy.model, part.prompts, part.completions, width, temperature)
        return token_logprobs(self.policy.model, part.batch, temperature)

    def _check(self, figures: dict[str, float]) -> None:
        if not math.isfinite(figures["rl.loss"]):
            self._stop(f"the loss is {figures['rl.loss']}")
        if not figures["rl.logprob_drift"] <= MAX_DRIFT:
            raise CheckFailed(
                f"engine and trainer disagree: mean |log-prob difference| {figures['rl.logprob_drift']:.2e} nats "
                f"at step {self.step}, allowed {MAX_DRIFT:.0e}",
                where="stage rl",
                fix="the engine holds other weights or another attention; do not train on its samples",
            )

    def _stop_without_signal(self, reward: float | None) -> None:
        told = "no episode could be judged" if reward is None else f"mean reward of the last step {reward:.3f}"
        solved = reward is not None and reward > 0.5
        raise CheckFailed(
            f"no learning signal in the first {self.step} steps: in every group all rewards were equal ({told})",
            where="stage rl",
            fix="give it harder tasks: these are solved already"
            if solved
            else "look at the verifiers' evidence; then a longer cold start, easier tasks or a graded verifier",
        )

    def _stop(self, what: str) -> None:
        raise CheckFailed(
            f"{what} at RL step {self.step}",
            where="stage rl",
            fix="lower rl.learning_rate; the last checkpoint and the policy before this stage are kept",
        )


def _rollout_figures(rollouts: Sequence[Rollout], advantages: Advantages) -> dict[str, float]:
    judged = [r.verdict.reward for r in rollouts if r.verdict.reward is not None]
    sampled = sum(r.trajectory.sampled_tokens for r in rollouts)
    figures = {
        "rl.tokens": sampled / len(rollouts),
        "rl.thinking_token_ratio": sum(r.trajectory.reasoning_tokens for r in rollouts) / max(1, sampled),
        "rl.entropy": -sum(sum(r.trajectory.logprobs) for r in rollouts) / max(1, sampled),
        "rl.constant_groups": advantages.constant_groups / advantages.groups,
        "rl.unjudged": advantages.unjudged / len(rollouts),
        "rl.tool_calls": sum(s.kind == "tool_result" for r in rollouts for s in r.trajectory.segments) / len(rollouts),
    }
    if judged:
        figures["rl.reward"] = sum(judged) / len(judged)
    return figures
