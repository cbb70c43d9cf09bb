"""What a guard says, and how it is shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from infra.errors import CheckFailed
from rl.guards.config import Action

BARS = "▁▂▃▄▅▆▇█"
SHOWN = 20
"""Values that an alarm carries."""
SEVERITY: dict[Action, int] = {"warn": 0, "lower_lr": 1, "skip_step": 2, "stop": 3}


@dataclass(frozen=True)
class Alarm:
    """A guard's alarm.

    ``values`` are the last values of ``figure``, at most ``SHOWN``, oldest first. ``quiet``: act, but do not say
    it again (the same was said a few steps ago).
    """

    guard: str
    action: Action
    step: int
    what: str
    figure: str
    values: tuple[float, ...]
    fix: str
    quiet: bool = False

    def line(self) -> str:
        """One line for the log."""
        shown = f" [{self.figure} {sparkline(self.values)}]" if self.values else ""
        return f"guard {self.guard} ({self.action}) at step {self.step}: {self.what}{shown}; {self.fix}"


def sparkline(values: Sequence[float]) -> str:
    """Values as bars between their lowest and highest; × where a value is NaN or infinite."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    # Halved first: the difference of two large values may overflow.
    width = high / 2 - low / 2
    bars = []
    for value in values:
        if not math.isfinite(value):
            bars.append("×")
        else:
            share = (value / 2 - low / 2) / width if width > 0 else 0.0
            bars.append(BARS[round(share * (len(BARS) - 1))])
    return "".join(bars)


def raise_on_stop(alarms: Sequence[Alarm]) -> None:
    """End the stage if an alarm says so.

    Raises:
        CheckFailed: what happened, the last values of the figure as bars and numbers, and what to do.
    """
    stops = [alarm for alarm in alarms if alarm.action == "stop"]
    if not stops:
        return
    blocks = []
    for alarm in stops:
        block = f"guard {alarm.guard} stopped the run: {alarm.what}"
        if alarm.values:
            numbers = " ".join(f"{value:.3g}" for value in alarm.values)
            block += f"\n  {alarm.figure}, last {len(alarm.values)}: {sparkline(alarm.values)}\n  {numbers}"
        blocks.append(block)
    fixes = list(dict.fromkeys(alarm.fix for alarm in stops))
    raise CheckFailed(
        "\n".join(blocks),
        where=f"stage rl, step {stops[0].step}",
        fix="; ".join([*fixes, "the last checkpoint and the last good policy are kept"]),
    )
