"""One policy, updated on its own episodes: rollout, advantages, objective, optimizer steps, guards."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from data_contracts.records import Task
from domain_rewards.runtime import DomainRuntime
from infra.compute.policy import LoadedPolicy
from infra.errors import CheckFailed
from infra.inference.embedded.engine import EmbeddedEngine
from infra.seeds import derive_seed, generator, random_states, restore_random_states
from infra.telemetry import logger
from rl.advantages import Advantages, group_advantages
from rl.config import RLConfig
from rl.experience import Experience, make_experience
from rl.figures import rollout_figures, sampled_ids
from rl.guards import Alarm, GuardPanel, raise_on_stop
from rl.guards.parameters import ParameterWatch
from rl.learner import Learner
from rl.objectives.aggregation import Normaliser
from rl.objectives.config import PPO
from rl.objectives.correction import CorrectionMetrics, bypass_allowed, correct
from rl.objectives.entropy import EntropyFloor
from rl.objectives.kl import kl_estimate, reward_penalty
from rl.objectives.length import mask_truncated, shaped_reward
from rl.objectives.ppo import gae, moments, outcome_rewards, whiten
from rl.rollout import EpisodeRequest, Rollout, RolloutSettings, play
from rl.sampler import TaskSampler
from rl.schedule import learning_rate
from rl.trajectory import EpisodeEnd, staleness
from rl.update import Counts, minibatch_parts, part_loss


@dataclass(frozen=True)
class Collected:
    """Episodes of a step, group after group; ``rewards`` with all penalties taken off, None = not judged."""

    rollouts: list[Rollout]
    rewards: list[float | None]
    advantages: Advantages


class Trainer:
    """Runs steps. Every draw of its own is addressed by seed and step, so no generator has to be carried along."""

    def __init__(
        self, policy: LoadedPolicy, config: RLConfig, tasks: Sequence[Task], runtime: DomainRuntime, seed: int
    ) -> None:
        if len(tasks) < config.groups:
            raise CheckFailed(
                f"{len(tasks)} training tasks are fewer than rl.groups = {config.groups}",
                where="domain.yaml, rl.groups",
                fix="lower rl.groups or provide more tasks",
            )
        self.policy, self.config, self.tasks, self.runtime, self.seed = policy, config, tasks, runtime, seed
        self.step = 0
        self.alarms = 0
        """Alarms raised so far, those of guards that were content to warn included."""
        self.learner = Learner(policy, config, derive_seed(seed, "learner"))
        self.sampler = TaskSampler(len(tasks), seed)
        self.floor = EntropyFloor(config.entropy) if config.entropy.largest > 0 else None
        self.panel = GuardPanel(config.guards)
        self.watch = ParameterWatch(self.learner.named_parameters())
        self.settings = RolloutSettings(
            config.max_tokens,
            config.max_turns,
            config.temperature,
            run_window=config.length.run_window,
            run_threshold=config.length.run_threshold,
        )

    @property
    def engine(self) -> EmbeddedEngine:
        """What the episodes are sampled with."""
        return self.learner.engine

    def state(self) -> dict[str, Any]:
        """Everything a resume needs: weights, optimizer, controllers, guards, positions, random states."""
        return {
            "learner": self.learner.state(),
            "step": self.step,
            "alarms": self.alarms,
            "sampler": self.sampler.state_dict(),
            "floor": None if self.floor is None else self.floor.state_dict(),
            "panel": self.panel.state_dict(),
            "watch": self.watch.state_dict(),
            "random": random_states(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state`, bit for bit."""
        self.learner.load_state(state["learner"])
        self.step, self.alarms = state["step"], state["alarms"]
        self.sampler.load_state_dict(state["sampler"])
        if self.floor is not None:
            self.floor.load_state_dict(state["floor"])
        self.panel.load_state_dict(state["panel"])
        self.watch.load_state_dict(state["watch"])
        restore_random_states(state["random"])

    def train_step(self) -> dict[str, float]:
        """Sample, judge, update; the figures of the step.

        Raises:
            CheckFailed: a guard stops the run, or all its steps went by without an update.
        """
        alarms_before = self.alarms
        collected = self._collect()
        figures = rollout_figures(collected.rollouts, collected.advantages, self.config.group_size)
        figures["rl.weight_lag"] = float(self.learner.updates - self.learner.synced_updates)
        versions = [rollout.trajectory.weight_version for rollout in collected.rollouts]
        figures["rl.staleness"] = float(staleness(versions, self.engine.weight_version).largest)
        kept = [i for i, keep in enumerate(collected.advantages.keep) if keep]
        if kept:
            experience, measured = self._prepare(collected, kept)
            figures |= measured | self._update(experience)
            self.learner.sync()
        self.step += 1
        self._heed(self.panel.observe(self.step, figures))
        if self.panel.parameters_due(self.learner.updates):
            self._heed(self.panel.observe_parameters(self.step, self.learner.updates, self.watch.unmoved()))
        if self.floor is not None and "rl.entropy" in figures:
            figures["rl.entropy_coefficient"] = self.floor.update(figures["rl.entropy"])
        if self.step == self.config.steps and not self.learner.updates:
            self._stop_without_signal(figures.get("rl.reward"))
        figures["rl.alarms"] = float(self.alarms - alarms_before)
        return figures

    def _collect(self) -> Collected:
        """Rounds of episodes until enough groups carry signal (``sampling_rounds``)."""
        config = self.config
        rollouts: list[Rollout] = []
        rewards: list[float | None] = []
        for number in range(config.sampling_rounds):
            fresh = self._sample(number)
            rollouts += fresh
            rewards += self._rewards(fresh)
            advantages = group_advantages(rewards, config.group_size, config.normalise_std, config.baseline)
            if advantages.groups - advantages.constant_groups >= config.groups:
                break
        if isinstance(config.objective, PPO):
            advantages = replace(advantages, keep=[reward is not None for reward in rewards])
        if config.length.truncated == "mask":
            cut = [rollout.trajectory.end is EpisodeEnd.LENGTH for rollout in rollouts]
            advantages = mask_truncated(advantages, cut)
        return Collected(rollouts, rewards, advantages)

    def _sample(self, number: int) -> list[Rollout]:
        config = self.config
        requests = [
            EpisodeRequest(self.tasks[index], derive_seed(self.seed, "rollout", self.step, number, slot, sample))
            for slot, index in enumerate(self.sampler.take(config.groups))
            for sample in range(config.group_size)
        ]
        return asyncio.run(play(self.engine, self.policy.renderer, self.runtime, requests, self.settings))

    def _rewards(self, rollouts: Sequence[Rollout]) -> list[float | None]:
        """Rewards after the penalties for length, repetition and, if it has its place here, KL."""
        config = self.config
        rewards = [shaped_reward(r.verdict.reward, sampled_ids(r), config.max_tokens, config.length) for r in rollouts]
        if config.kl.coefficient == 0 or config.kl.place != "reward":
            return rewards
        some = [i for i, reward in enumerate(rewards) if reward is not None and rollouts[i].trajectory.ids]
        if some:
            experience = self._experience([rollouts[i] for i in some], [0.0] * len(some), [0.0] * len(some))
            reference = self.learner.reference_logprobs(experience)
            penalties = reward_penalty(
                experience.rollout_logprobs, reference, experience.batch.mask, config.kl.coefficient
            )
            for i, penalty in zip(some, penalties.tolist(), strict=True):
                rewards[i] = (rewards[i] or 0.0) - penalty
        return rewards

    def _experience(self, rollouts: Sequence[Rollout], values: list[float], rms: list[float]) -> Experience:
        pad = self.policy.tokenizer.pad_token_id or 0
        return make_experience([rollout.trajectory for rollout in rollouts], values, rms, pad)

    def _prepare(self, collected: Collected, kept: Sequence[int]) -> tuple[Experience, dict[str, float]]:
        """The kept episodes with all that is computed before the first update, and what was measured on the way."""
        config, advantages = self.config, collected.advantages
        experience = self._experience(
            [collected.rollouts[i] for i in kept],
            [advantages.values[i] for i in kept],
            [advantages.rms[i] for i in kept],
        )
        figures: dict[str, float] = {}
        mask = experience.batch.mask
        if self.learner.has_reference:
            experience = replace(experience, reference=self.learner.reference_logprobs(experience))
        if isinstance(config.objective, PPO):
            rewards = torch.tensor([collected.rewards[i] or 0.0 for i in kept])
            experience = self._with_estimates(experience, rewards, config.objective)
            metrics = self._mismatch(experience)
        elif self._bypassed(experience, figures):
            experience, metrics = replace(experience, old_logprobs=experience.rollout_logprobs), None
        elif self._corrects or self._several_updates(experience):
            experience = replace(experience, old_logprobs=self.learner.frozen_scores(experience).logprobs)
            metrics = self._mismatch(experience)
        else:
            metrics = None
        if metrics is not None:
            figures |= metrics.figures()
            if self._corrects:
                assert experience.old_logprobs is not None
                weights = correct(experience.old_logprobs, experience.rollout_logprobs, mask, config.correction).weights
                experience = replace(experience, correction=weights)
        if experience.reference is not None:
            before = experience.rollout_logprobs if experience.old_logprobs is None else experience.old_logprobs
            kl = kl_estimate(before, experience.reference, mask, "k3")
            figures["rl.kl_to_reference"] = float(kl.values.double().sum()) / float(mask.sum())
            figures["rl.kl_clamped"] = float(kl.clamped)
        return experience, figures

    @property
    def _corrects(self) -> bool:
        return self.config.correction.weights != "off" or self.config.correction.mask != "off"

    def _several_updates(self, experience: Experience) -> bool:
        return self.config.epochs > 1 or experience.count > self.config.minibatch

    def _mismatch(self, experience: Experience) -> CorrectionMetrics:
        """Engine against trainer; needs ``old_logprobs``."""
        assert experience.old_logprobs is not None
        return correct(
            experience.old_logprobs, experience.rollout_logprobs, experience.batch.mask, self.config.correction
        ).metrics

    def _bypassed(self, experience: Experience, figures: dict[str, float]) -> bool:
        """Whether the engine's log-probs stand for pi_old: asked for, and allowed by a micro-batch's mismatch."""
        if self.config.correction.old_logprobs != "bypass":
            return False
        probe = experience.rows(range(min(self.config.microbatch, experience.count)))
        metrics = self._mismatch(replace(probe, old_logprobs=self.learner.frozen_scores(probe).logprobs))
        allowed = bypass_allowed(metrics, self.config.clip.low)
        figures |= metrics.figures() | {"rl.bypassed": float(allowed)}
        return allowed

    def _with_estimates(self, experience: Experience, rewards: Tensor, objective: PPO) -> Experience:
        """Old log-probs and values, whitened advantages and returns (PPO)."""
        scores, mask = self.learner.frozen_scores(experience, values=True), experience.batch.mask
        assert scores.values is not None
        estimates = gae(outcome_rewards(rewards, mask).values, scores.values, mask, objective.gamma, objective.lam)
        advantages = estimates.advantages
        if objective.whiten:
            advantages = whiten(advantages, mask, moments(advantages, mask))
        return replace(
            experience,
            old_logprobs=scores.logprobs,
            old_values=scores.values,
            token_advantages=advantages,
            returns=estimates.returns,
        )

    def _update(self, experience: Experience) -> dict[str, float]:
        """``epochs`` passes in minibatches; one optimizer step per minibatch."""
        config = self.config
        rate = learning_rate(config, self.step) * self.panel.learning_rate_scale
        whole, first = Counts(), None
        metrics: CorrectionMetrics | None = None
        norms: list[float] = []
        made = self.learner.updates
        for epoch in range(config.epochs):
            order = list(range(experience.count))
            generator(self.seed, "minibatch", self.step, epoch).shuffle(order)
            for start in range(0, experience.count, config.minibatch):
                rows = order[start : start + config.minibatch]
                counts, norm, mismatch = self._minibatch(experience, rows, rate)
                whole, first, metrics = whole + counts, first or counts, metrics or mismatch
                norms.append(norm)
        assert first is not None
        figures = whole.figures(len(norms)) | {
            "rl.updates": float(self.learner.updates - made),
            "rl.learning_rate": rate,
            "rl.grad_norm": sum(norms) / len(norms),
            "rl.grad_norm_max": max(norms),
        }
        if experience.old_logprobs is not None and experience.old_logprobs is not experience.rollout_logprobs:
            figures["rl.on_policy_ratio_error"] = first.ratio_error
        if isinstance(config.objective, PPO):
            figures["rl.value_loss"] = whole.value_loss / len(norms)
        return figures | ({} if metrics is None else metrics.figures())

    def _minibatch(
        self, experience: Experience, rows: list[int], rate: float
    ) -> tuple[Counts, float, CorrectionMetrics | None]:
        """One update; what was counted, the gradient norm before clipping, the mismatch if it is measured here."""
        config, learner = self.config, self.learner
        mask = experience.batch.mask[torch.tensor(rows)]
        # A short minibatch (the rest of a pass) keeps the weight per sequence that a full one has.
        normaliser = Normaliser(max(len(rows), config.minibatch), int(mask.sum()), config.max_tokens)
        coefficient = 0.0 if self.floor is None else self.floor.applied
        learner.optimizer.zero_grad()
        counts, mismatch = Counts(), None
        for part in minibatch_parts(experience, rows, config.microbatch):
            scores = learner.score(part, entropy=coefficient > 0, values=part.old_values is not None)
            if part.old_logprobs is None:
                here = self._mismatch(replace(part, old_logprobs=scores.logprobs.detach()))
                mismatch = here if mismatch is None else mismatch + here
            loss, counted = part_loss(part, scores, config, normaliser, coefficient)
            torch.autograd.backward(loss)
            counts += counted
        self.watch.look()
        parameters = [parameter for _, parameter in learner.named_parameters()]
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm))
        alarms = self.panel.before_update(self.step + 1, norm, {"rl.loss": counts.loss})
        self._heed(alarms)
        if not any(alarm.action == "skip_step" for alarm in alarms):
            learner.step(rate)
        return counts, norm, mismatch

    def _heed(self, alarms: Sequence[Alarm]) -> None:
        """Say what the guards found; stop if one says so."""
        self.alarms += len(alarms)
        for alarm in alarms:
            if not alarm.quiet and alarm.action != "stop":
                logger.warning("rl: %s", alarm.line())
        raise_on_stop(alarms)

    def _stop_without_signal(self, reward: float | None) -> None:
        told = "no episode could be judged" if reward is None else f"mean reward of the last step {reward:.3f}"
        solved = reward is not None and reward > 0.5
        raise CheckFailed(
            f"no learning signal in {self.step} steps: in every group all rewards were equal ({told})",
            where="stage rl",
            fix="give it harder tasks: these are solved already"
            if solved
            else "look at the verifiers' evidence; then a longer cold start, easier tasks or a graded verifier",
        )
