"""The judge: all verifiers of a domain over one episode, with "could not be judged" as a state of its own."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Generator, Sequence
from functools import partial
from numbers import Real
from typing import Any, TypeVar

from domain_rewards.deadline import TimeUp, on_main_thread, within
from domain_rewards.environments.threads import in_thread
from domain_rewards.episode import Episode
from domain_rewards.verifiers.base import Verifier
from infra.records import Record

MAX_EVIDENCE = 500
"""Most characters kept of what a verifier raised."""
R = TypeVar("R")


class Verdict(Record):
    """The reward of an episode: a number in [0, 1], or None when it could not be judged (never a silent 0)."""

    reward: float | None
    parts: dict[str, float | None]
    """Score per verifier."""
    evidence: dict[str, str]
    """Per verifier without a score: why."""


async def judge(episode: Episode, verifiers: Sequence[Verifier], timeout_s: float = 30.0) -> Verdict:
    """Weighted mean of the verifiers' scores; None as soon as one of them has none.

    A crash (``sys.exit`` included), a timeout, None, or a value that is not a number in [0, 1] leaves that verifier
    without a score and is told in ``evidence``. An episode that was cut is judged like any other: it has no answer.

    Each verifier has ``timeout_s`` seconds. Async and isolated ones run concurrently. Plain ones run inline, one after
    the other (:func:`within`); off the main thread, where a signal cannot end them, they are isolated too.
    """
    parts: dict[str, float | None] = {each.name: None for each in verifiers}
    evidence: dict[str, str] = {}
    waiting = []
    inline = on_main_thread()
    for each in verifiers:
        if each.is_async or each.isolate or not inline:
            waiting.append(each)
            continue
        try:
            _settle(each.name, within(timeout_s, partial(each.function, episode)), parts, evidence)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            evidence[each.name] = _late(timeout_s) if isinstance(error, TimeUp) else _reason(error)
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
            score: Any = (
                _Stepwise(each.function(episode), timeout_s)
                if each.is_async
                else in_thread(partial(each.function, episode))
            )
            _settle(each.name, await score, parts, evidence)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise  # the judge is cancelled; otherwise the verifier gave up by itself
        timed_out = isinstance(error, TimeUp) or (isinstance(error, TimeoutError) and deadline.expired())
        evidence[each.name] = _late(timeout_s) if timed_out else _reason(error)


class _Stepwise:
    """Awaits a coroutine, each stretch between two awaits by :func:`within`: a loop there would stop the event loop."""

    def __init__(self, coroutine: Any, seconds: float) -> None:
        self._coroutine: Coroutine[Any, Any, Any] = coroutine
        self._seconds = seconds

    def __await__(self) -> Generator[Any, Any, Any]:
        step: Callable[[], Any] = partial(self._coroutine.send, None)
        while True:
            try:
                awaited = self._run(step)
            except StopIteration as done:
                return done.value
            try:
                yield awaited
            except BaseException as error:
                step = partial(self._coroutine.throw, error)
            else:
                step = partial(self._coroutine.send, None)

    def _run(self, step: Callable[[], R]) -> R:
        return within(self._seconds, step) if on_main_thread() else step()


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


def _late(timeout_s: float) -> str:
    return f"timeout: no score within {timeout_s:g} s"


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_EVIDENCE]
