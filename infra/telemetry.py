"""Progress that people see: a Rich bar in a terminal, log lines elsewhere. Nothing leaves the machine."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

logger = logging.getLogger("senmon")
LOG_INTERVAL_S = 10.0


class Progress(Protocol):
    """A running piece of work with a known number of steps."""

    def advance(self, steps: int = 1, **shown: float) -> None:
        """Count ``steps`` done and show the given figures."""
        ...


@contextmanager
def progress(description: str, total: int, start: int = 0) -> Iterator[Progress]:
    """Show progress on stderr, with elapsed time and ETA; ``start`` steps are already done (a resumed stage)."""
    if sys.stderr.isatty():
        with _bar(description, total, start) as bar:
            yield bar
    else:
        yield _LogLines(description, total, start)


def _figures(shown: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in shown.items())


class _LogLines:
    def __init__(self, description: str, total: int, start: int) -> None:
        self._description, self._total = description, total
        self._done = self._first = start
        self._began = self._last = time.monotonic()

    def advance(self, steps: int = 1, **shown: float) -> None:
        self._done += steps
        now = time.monotonic()
        if now - self._last < LOG_INTERVAL_S and self._done < self._total:
            return
        self._last = now
        rate = (now - self._began) / max(1, self._done - self._first)
        left = max(0, self._total - self._done) * rate
        logger.info("%s %d/%d  ETA %.0f s  %s", self._description, self._done, self._total, left, _figures(shown))


@contextmanager
def _bar(description: str, total: int, start: int) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
    )

    with RichProgress(*columns, console=Console(stderr=True)) as display:
        task = display.add_task(description, total=total, completed=start, figures="")

        class Bar:
            def advance(self, steps: int = 1, **shown: float) -> None:
                if shown:
                    display.update(task, figures=_figures(shown))
                display.update(task, advance=steps)

        yield Bar()
