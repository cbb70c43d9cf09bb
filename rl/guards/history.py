"""What the guards remember of a run: recent values of each figure, and how it began."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

KEPT = 128
"""Values kept per figure: more than any window or patience asks for."""


class History:
    """Finite values of each figure, in order; an undefined one (None) leaves no trace."""

    def __init__(self, start_steps: int) -> None:
        self._start_steps = start_steps
        self._series: dict[str, list[float]] = {}
        self._start: dict[str, list[float]] = {}
        self._lowest: dict[str, float] = {}
        self.now: dict[str, float] = {}
        """The finite figures of the step being looked at; rules act only on figures that are in here."""

    def add(self, figures: Mapping[str, float | None]) -> None:
        """Append a step's figures."""
        self.now = {}
        for name, value in figures.items():
            if value is None or not math.isfinite(value):
                continue
            value = float(value)
            self.now[name] = value
            self._series[name] = [*self._series.get(name, []), value][-KEPT:]
            self._lowest[name] = min(value, self._lowest.get(name, value))
            start = self._start.setdefault(name, [])
            if len(start) < self._start_steps:
                start.append(value)

    def last(self, figure: str, count: int) -> list[float]:
        """The last ``count`` values, oldest first; fewer if there are fewer."""
        return self._series.get(figure, [])[-count:]

    def before(self, figure: str, count: int, skip: int = 1) -> list[float]:
        """The ``count`` values before the last ``skip`` ones."""
        return self._series.get(figure, [])[:-skip][-count:]

    def recent(self, figure: str, count: int) -> float | None:
        """Median of the last ``count`` values; None with fewer."""
        values = self.last(figure, count)
        return statistics.median(values) if len(values) == count else None

    def start(self, figure: str) -> float | None:
        """Median of the first values; None until there are ``start_steps``."""
        values = self._start.get(figure, [])
        return statistics.median(values) if len(values) == self._start_steps else None

    def lowest(self, figure: str) -> float | None:
        """Lowest value ever seen."""
        return self._lowest.get(figure)

    def state_dict(self) -> dict[str, Any]:
        """Plain values that :meth:`load_state_dict` restores exactly."""
        return {
            "series": {name: list(values) for name, values in self._series.items()},
            "start": {name: list(values) for name, values in self._start.items()},
            "lowest": dict(self._lowest),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        self._series = {name: list(values) for name, values in state["series"].items()}
        self._start = {name: list(values) for name, values in state["start"].items()}
        self._lowest = dict(state["lowest"])
        self.now = {}
