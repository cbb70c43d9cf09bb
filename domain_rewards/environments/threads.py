"""Blocking code with a deadline: one daemon thread per call, so that a call that hangs holds nobody up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

R = TypeVar("R")


async def in_thread(function: Callable[[], R]) -> R:
    """The result of ``function``, run in a thread of its own.

    Cancelling the wait abandons the thread: Python cannot stop it, but being a daemon it never delays the end
    of the process (the default executor of asyncio would).
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[R] = loop.create_future()

    def settle(result: R | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # R may itself be None

    def work() -> None:
        result: R | None = None
        error: BaseException | None = None
        try:
            result = function()
        except StopIteration as stop:  # a future refuses StopIteration
            error = RuntimeError(f"StopIteration: {stop}")
        except BaseException as raised:
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name="senmon-isolated", daemon=True).start()
    return await future
