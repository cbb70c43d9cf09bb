"""Ctrl-C and SIGTERM as a request that cannot get lost on its way.

A signal handler that only raises is not enough: Python drops the exception when it arrives in a weak reference's
callback or a finaliser, and libraries catch it. So the handler also remembers, and whoever is about to go on asks.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Whether the user, or the machine, asked this run to stop. Used on the main thread only."""

    def __init__(self) -> None:
        self._requested = False

    @property
    def requested(self) -> bool:
        """Whether a signal came, whatever became of its exception."""
        return self._requested

    def check(self) -> None:
        """Raises ``KeyboardInterrupt`` if a signal came."""
        if self._requested:
            raise KeyboardInterrupt

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Inside the block both signals raise ``KeyboardInterrupt`` and are remembered.

        It may be entered again after a library put a handler of its own in place. A signal that the process was
        started to ignore stays ignored.
        """
        heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = [(number, signal.signal(number, self._on_signal)) for number in heard]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._requested = True
        raise KeyboardInterrupt
