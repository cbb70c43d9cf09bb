"""Python code of a domain that must end in time, on the main thread."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

RETRY_SECONDS = 0.1
"""Code that caught the end of its time is told again after so long."""
R = TypeVar("R")


class TimeUp(BaseException):
    """The time is over; not an ``Exception``, so that code which retries on errors lets it through."""


def within(seconds: float, call: Callable[[], R]) -> R:
    """The result of ``call``, which is ended after ``seconds``; main thread only, some 10 µs.

    A thread would not do: a regular expression that backtracks without end holds the interpreter, so that nobody could
    wait for the thread, nor hear Ctrl-C. A timer's signal ends it, as it ends Python loops, sleeps, reads from a
    socket and large powers; C code that does not look at signals (a SQL query) ends late, when it returns.

    Raises:
        TimeUp: the time was over.
    """
    here = sys._getframe()
    tracer = sys.gettrace()
    running = True

    def trace(_frame: FrameType, event: str, _argument: Any) -> Callable[..., Any]:
        if running and event == "line":
            raise TimeUp
        return trace

    def interrupt(_signal: int, frame: FrameType | None) -> None:
        if not running:
            return
        # The next line that runs raises as well: a bare `except:` that caught the first one would go on for ever.
        while frame is not None and frame is not here:
            frame.f_trace = trace
            frame = frame.f_back
        sys.settrace(trace)
        raise TimeUp

    handler = signal.signal(signal.SIGALRM, interrupt)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, RETRY_SECONDS)
    try:
        return call()
    finally:
        running = False
        if sys.gettrace() is not tracer:
            sys.settrace(tracer)
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def on_main_thread() -> bool:
    """Whether :func:`within` can be used here."""
    return threading.current_thread() is threading.main_thread()
