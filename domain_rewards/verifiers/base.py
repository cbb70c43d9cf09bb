"""Verifiers: functions that score an episode in [0, 1], or say that they cannot."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from domain_rewards.episode import Episode
from infra.errors import UsageError

Score = float | None
Function = Callable[[Episode], Score] | Callable[[Episode], Awaitable[Score]]


@dataclass(frozen=True)
class Verifier:
    """A named, weighted scoring function; calling it calls the function."""

    name: str
    function: Function
    weight: float
    isolate: bool
    """Run a blocking function in a thread, so that the judge's time limit holds for it."""
    is_async: bool

    def __call__(self, episode: Episode) -> Score | Awaitable[Score]:
        """What the function returns: for an ``async`` one, something to await."""
        return self.function(episode)


def verifier(name: str, weight: float = 1.0, *, isolate: bool = False) -> Callable[[Function], Verifier]:
    """Make a function ``Episode -> float | None`` (plain or ``async``) a verifier.

    It returns a score in [0, 1], or None when it cannot tell. A plain function runs inline unless ``isolate``.

    Raises:
        UsageError: the name is empty, or the weight is not a positive, finite number.
    """
    if not name or not (weight > 0 and math.isfinite(weight)):
        raise UsageError(
            f"a verifier needs a name and a positive weight, not {name!r} with weight {weight}",
            where=f"@verifier({name!r}, weight={weight})",
            fix="give it a name and a weight above 0",
        )

    def wrap(function: Function) -> Verifier:
        return Verifier(name, function, weight, isolate, inspect.iscoroutinefunction(function))

    return wrap
