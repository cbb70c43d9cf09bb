"""The judge: all verifiers of a domain over one episode, with "could not be judged" as a state of its own."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from domain_rewards.environments.threads import in_thread
from domain_rewards.episode import Episode
from domain_rewards.verifiers.base import Verifier
from infra.records import Record

MAX_EVIDENCE = 500
"""Most characters kept of what a verifier raised."""


class Verdict(Record):
    """The reward of an episode: a number in [0, 1], or None when it could not be judged (never a silent 0)."""

    reward: float | None
    parts: dict[str, float | None]
    """Score per verifier."""
    evidence: dict[str, str]
    """Per verifier without a score: why."""


async def judge(episode: Episode, verifiers: Sequence[Verifier], timeout_s: float = 30.0) -> Verdict:
    """Weighted mean of the verifiers' scores; None as soon as one of them has none.

    A crash, a timeout, None, or a value that is not a number in [0, 1] leaves that verifier without a score and is
    told in ``evidence``. An episode that was cut is judged like any other: it has no answer. Async and isolated
    verifiers run concurrently, each for at most ``timeout_s`` seconds; plain ones run inline, without a limit.
    """
    parts: dict[str, float | None] = {}
    evidence: dict[str, str] = {}
    waiting = []
    for each in verifiers:
        parts[each.name] = None
        if each.is_async or each.isolate:
            waiting.append(each)
            continue
        try:
            _settle(each.name, each.function(episode), parts, evidence)
        except Exception as error:
            evidence[each.name] = _reason(error)
    if waiting:
        await asyncio.gather(*(_wait_for(each, episode, timeout_s, parts, evidence) for each in waiting))
    return Verdict(reward=_weighted_mean(verifiers, parts), parts=parts, evidence=evidence)


def unjudged(verifiers: Sequence[Verifier], reason: str) -> Verdict:
    """Verdict of an episode that never came to be judged, because its environment failed."""
    return Verdict(
        reward=None, parts={each.name: None for each in verifiers}, evidence={"environment": reason[:MAX_EVIDENCE]}
    )


async def _wait_for(
    each: Verifier, episode: Episode, timeout_s: float, parts: dict[str, float | None], evidence: dict[str, str]
) -> None:
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            score: Any = each.function(episode) if each.is_async else in_thread(lambda: each.function(episode))
            _settle(each.name, await score, parts, evidence)
    except Exception as error:
        timed_out = isinstance(error, TimeoutError) and deadline.expired()
        evidence[each.name] = f"no score within {timeout_s:g} s" if timed_out else _reason(error)


def _settle(name: str, score: Any, parts: dict[str, float | None], evidence: dict[str, str]) -> None:
    if score is None:
        evidence[name] = "the verifier could not tell"
    elif not isinstance(score, Real) or not 0.0 <= (value := float(score)) <= 1.0:
        evidence[name] = f"the verifier returned {score!r:.100}, which is not a number in [0, 1]"
    else:
        parts[name] = value


def _weighted_mean(verifiers: Sequence[Verifier], parts: dict[str, float | None]) -> float | None:
    total = weights = 0.0
    for each in verifiers:
        score = parts[each.name]
        if score is None:
            return None
        total += each.weight * score
        weights += each.weight
    mean = total / weights if weights else math.nan
    # rounding may leave the interval by one ulp
    return min(1.0, max(0.0, mean)) if math.isfinite(mean) else None


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_EVIDENCE]
