"""Evaluation of a policy on held-out tasks: greedy and sampled, with confidence intervals."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from data_contracts.records import Task
from domain_rewards.runtime import DomainRuntime
from infra.compute.logprobs import align, pad_sequences, token_logprobs
from infra.compute.policy import LoadedPolicy, load_policy
from infra.inference.engine import Engine
from infra.records import Record
from infra.seeds import derive_seed
from infra.telemetry import progress
from rl.config import EvalConfig
from rl.rollout import EpisodeRequest, Rollout, RolloutSettings, play

SUCCESS = 1.0


class Interval(Record):
    """A 95 % Wilson score interval."""

    low: float
    high: float


class EvalReport(Record):
    """What a policy does on a split.

    ``success`` is the share of judged episodes with full reward, greedy; ``success_sampled`` the same at the
    evaluation temperature. Unjudged episodes are counted and kept out of every share; a figure that is not
    defined (nothing judged, nothing sampled) is None. ``thinking_token_ratio`` is sum/sum over the greedy
    episodes; ``mean_tokens`` are sampled tokens per greedy episode; ``mean_seconds`` is wall-clock time per
    episode in a full batch; ``kl_to_reference`` is the k3 estimate in nats per token on the sampled episodes.
    """

    episodes: int
    success: float | None
    success_interval: Interval | None
    success_sampled: float | None
    unjudged: int
    thinking_token_ratio: float | None
    mean_tokens: float | None
    mean_turns: float | None
    mean_seconds: float | None
    kl_to_reference: float | None = None
    ends: dict[str, int] = Field(default_factory=dict)
    unjudged_reasons: dict[str, int] = Field(default_factory=dict)
    """Why episodes could not be judged, the five most frequent reasons."""


def evaluate_policy(
    policy: Path,
    tasks: Sequence[Task],
    runtime: DomainRuntime,
    config: EvalConfig,
    seed: int,
    reference: Path | None = None,
) -> EvalReport:
    """Play every task once greedy and once sampled.

    Args:
        reference: policy to measure the KL divergence against, or None.
    """
    loaded = load_policy(policy)
    engine = loaded.engine()
    with progress(f"evaluation of {policy.parent.name}", 2 * len(tasks)) as bar:
        greedy = play_all(engine, loaded, tasks, runtime, config, 0.0, seed)
        bar.advance(len(tasks), success=_share(greedy) or 0.0)
        sampled = play_all(engine, loaded, tasks, runtime, config, config.temperature, seed)
        bar.advance(len(tasks), success=_share(sampled) or 0.0)
    kl = None
    if reference is not None:
        kl = kl_to_reference(loaded, load_policy(reference), sampled, config.temperature)
    return summarise(greedy, _share(sampled), kl)


def play_all(
    engine: Engine,
    policy: LoadedPolicy,
    tasks: Sequence[Task],
    runtime: DomainRuntime,
    config: EvalConfig,
    temperature: float,
    seed: int,
) -> list[Rollout]:
    """One episode per task, ``config.batch_size`` in flight."""
    settings = RolloutSettings(config.max_tokens, config.max_turns, temperature)
    rollouts: list[Rollout] = []
    for start in range(0, len(tasks), config.batch_size):
        requests = [
            EpisodeRequest(task, derive_seed(seed, "evaluation", task.task_id))
            for task in tasks[start : start + config.batch_size]
        ]
        rollouts += asyncio.run(play(engine, policy.renderer, runtime, requests, settings))
    return rollouts


def summarise(greedy: Sequence[Rollout], success_sampled: float | None, kl: float | None) -> EvalReport:
    """Fold greedy episodes into a report."""
    judged = [r for r in greedy if r.verdict.reward is not None]
    wins = sum(r.verdict.reward == SUCCESS for r in judged)
    sampled = sum(r.trajectory.sampled_tokens for r in greedy)
    reasoning = sum(r.trajectory.reasoning_tokens for r in greedy)
    ends: dict[str, int] = {}
    for rollout in greedy:
        ends[rollout.trajectory.end.value] = ends.get(rollout.trajectory.end.value, 0) + 1
    reasons = Counter(
        f"{name}: {why}" for r in greedy if r.verdict.reward is None for name, why in r.verdict.evidence.items()
    )
    count = len(greedy)
    return EvalReport(
        episodes=count,
        success=wins / len(judged) if judged else None,
        success_interval=wilson(wins, len(judged)) if judged else None,
        success_sampled=success_sampled,
        unjudged=count - len(judged),
        thinking_token_ratio=reasoning / sampled if sampled else None,
        mean_tokens=sampled / count if count else None,
        mean_turns=sum(sum(s.kind == "turn" for s in r.trajectory.segments) for r in greedy) / count if count else None,
        mean_seconds=sum(r.seconds for r in greedy) / count if count else None,
        kl_to_reference=kl,
        ends=ends,
        unjudged_reasons=dict(reasons.most_common(5)),
    )


def wilson(wins: int, count: int, z: float = 1.959963984540054) -> Interval:
    """The Wilson score interval of a share (E. B. Wilson, 1927)."""
    share = wins / count
    centre = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return Interval(low=max(0.0, (centre - spread) / scale), high=min(1.0, (centre + spread) / scale))


def kl_to_reference(
    policy: LoadedPolicy, reference: LoadedPolicy, rollouts: Sequence[Rollout], temperature: float
) -> float | None:
    """Mean k3 estimate (nats per policy token): ``exp(-d) - 1 + d`` with ``d = log pi - log pi_ref`` (Schulman, 2020).

    The policy's log-probs are those it sampled with; the reference's are computed here.
    """
    import torch

    total, tokens = 0.0, 0
    for start in range(0, len(rollouts), 64):
        chunk = [r.trajectory for r in rollouts[start : start + 64]]
        pad = policy.tokenizer.pad_token_id or 0
        batch = pad_sequences([t.prompt for t in chunk], [t.ids for t in chunk], [t.mask for t in chunk], pad)
        sampled = align([t.prompt for t in chunk], [t.logprobs for t in chunk], batch.ids.shape[1])
        with torch.no_grad():
            d = (sampled - token_logprobs(reference.model, batch, temperature)) * batch.mask
        total += float(((-d).exp() - 1 + d).double().sum())
        tokens += int(batch.mask.sum())
    return total / tokens if tokens and math.isfinite(total) else None


def _share(rollouts: Sequence[Rollout]) -> float | None:
    judged = [r.verdict.reward for r in rollouts if r.verdict.reward is not None]
    return sum(reward == SUCCESS for reward in judged) / len(judged) if judged else None
