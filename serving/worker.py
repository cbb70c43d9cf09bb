"""One thread per loaded model drives its engine; requests talk to it through queues.

The thread owns the engine: it admits requests, steps, hands tokens to the event loop of each request, and
releases a sequence at the step after its request has been cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from infra.inference.engine import Engine, SamplingParams, StopReason, TokenEvent
from infra.inference.renderers.base import Renderer
from serving.errors import ApiError

logger = logging.getLogger(__name__)

Clock = Callable[[], float]


@dataclass(frozen=True)
class Started:
    """The engine took the request at ``at`` (seconds of the worker's clock)."""

    at: float


@dataclass(frozen=True)
class Piece:
    """Tokens that one engine step brought; ``finished`` is set on the last piece."""

    tokens: tuple[int, ...]
    at: float
    finished: StopReason | None = None


@dataclass(frozen=True)
class Expired:
    """The deadline of the request has passed."""


Event = Started | Piece | Expired | ApiError


class ThinkingCap:
    """Stops thinking at ``budget`` tokens: the first token above it is dropped and the end is forced instead.

    A model that ends its thinking by itself at exactly the budget is left alone.
    """

    def __init__(self, renderer: Renderer, budget: int) -> None:
        self.budget = budget
        self.exhausted = False
        self._renderer = renderer
        self._parser = renderer.stream_parser()

    def exceeded_by(self, token: int) -> bool:
        """Would this token be one thinking token too many?"""
        self._parser.feed(token)
        return self._parser.reasoning_tokens > self.budget

    def forced(self, kept: Sequence[int]) -> tuple[int, ...]:
        """Ids to put after the tokens kept so far."""
        self.exhausted = True
        ids = tuple(self._renderer.forced_end_of_thinking())
        self._parser = self._renderer.stream_parser()
        for token in (*kept, *ids):
            self._parser.feed(token)
        return ids


class Generation:
    """One request in a worker, seen from its event loop: read events until a finished piece, or cancel."""

    def __init__(
        self, prompt: Sequence[int], sampling: SamplingParams, cap: ThinkingCap | None, wake: Callable[[], None]
    ) -> None:
        self.prompt = tuple(prompt)
        self.sampling = sampling
        self.cap = cap
        self.tokens: list[int] = []
        """Kept tokens; written by the worker's thread only."""
        self.cancelled = False
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that reads this generation."""
        return self._loop

    async def next(self) -> Event:
        """The next event."""
        return await self._events.get()

    def put(self, event: Event) -> None:
        """Add an event; on the generation's own loop only."""
        self._events.put_nowait(event)

    def cancel(self) -> None:
        """Free the slot; the worker drops the sequence before its next step. Safe to repeat."""
        if not self.cancelled:
            self.cancelled = True
            self._wake()

    def expire(self) -> None:
        """Cancel because of the deadline, and tell the reader."""
        self.cancel()
        self.put(Expired())


class EngineWorker:
    """The thread of one engine.

    Args:
        engine: driven by this thread alone from now on.
        name: of the thread, for logs.
        max_running: sequences decoded together; further requests wait.
        max_waiting: waiting requests beyond which new ones are refused.
        clock: monotonic seconds.
    """

    def __init__(
        self, engine: Engine, name: str, *, max_running: int = 32, max_waiting: int = 128, clock: Clock = time.monotonic
    ) -> None:
        self._engine = engine
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._clock = clock
        self._inbox: queue.SimpleQueue[Generation | None] = queue.SimpleQueue()
        self._waiting: deque[Generation] = deque()
        self._running: dict[int, Generation] = {}
        self._closing = False
        self._open = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Can it take requests?"""
        return self._thread.is_alive() and not self._closing

    def submit(self, prompt: Sequence[int], sampling: SamplingParams, cap: ThinkingCap | None = None) -> Generation:
        """Queue a request; call it on the event loop that will read the events.

        Raises:
            ApiError: 503 when the queue is full or the engine has stopped.
        """
        with self._lock:
            if not self.alive:
                raise _engine_stopped()
            if self._open >= self._max_running + self._max_waiting:
                raise ApiError(503, "The model is at capacity.", code="engine_overloaded", retry_after=1)
            self._open += 1
            generation = Generation(prompt, sampling, cap, self._wake)
            self._inbox.put(generation)
            return generation

    def close(self, timeout: float = 30.0) -> None:
        """Stop the thread; whatever is still open gets an error."""
        self._closing = True
        self._wake()
        self._thread.join(timeout)

    def _wake(self) -> None:
        self._inbox.put(None)

    def _run(self) -> None:
        failure: Exception | None = None
        try:
            while not self._closing:
                self._receive()
                self._drop_cancelled()
                self._admit()
                if self._running:
                    self._deliver(self._engine.step())
        except Exception as error:
            logger.exception("the engine failed; its requests end with an error")
            failure = error
        with self._lock:
            self._closing = True
        if failure is None:
            for sequence in self._running:
                self._engine.release(sequence)
        self._end_all(_engine_stopped() if failure is None else _engine_failed())

    def _receive(self) -> None:
        """Take what has arrived; sleep only when there is nothing to do."""
        idle = not self._running and not self._waiting
        try:
            while True:
                generation = self._inbox.get(block=idle)
                idle = False
                if generation is not None:
                    self._waiting.append(generation)
        except queue.Empty:
            return

    def _drop_cancelled(self) -> None:
        for sequence, generation in list(self._running.items()):
            if generation.cancelled:
                self._end(sequence)
        kept = [generation for generation in self._waiting if not generation.cancelled]
        self._closed(len(self._waiting) - len(kept))
        self._waiting = deque(kept)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            generation = self._waiting.popleft()
            at = self._clock()
            try:
                [sequence] = self._engine.submit(generation.prompt, [generation.sampling])
            except ValueError as error:
                self._closed(1)
                refused = ApiError(
                    400, f"The engine refused the prompt: {error}.", code="invalid_prompt", param="messages"
                )
                self._send([(generation, refused)])
                continue
            self._running[sequence] = generation
            self._send([(generation, Started(at))])

    def _deliver(self, events: Sequence[TokenEvent]) -> None:
        at = self._clock()
        batch: list[tuple[Generation, Event]] = []
        for event in events:
            generation = self._running.get(event.sequence)
            if generation is None:
                continue
            if generation.cap is not None and generation.cap.exceeded_by(event.token):
                piece = self._force_end_of_thinking(event.sequence, generation, generation.cap, at)
            else:
                generation.tokens.append(event.token)
                piece = Piece((event.token,), at, event.finished)
                if event.finished is not None:
                    self._end(event.sequence)
            batch.append((generation, piece))
        self._send(batch)

    def _force_end_of_thinking(self, sequence: int, generation: Generation, cap: ThinkingCap, at: float) -> Piece:
        """Replace the sampled token by the end of thinking; the sequence goes on as a new one of the engine.

        A running sequence cannot be extended, so its past is submitted again as a prompt.
        """
        self._end(sequence, closed=False)
        left = generation.sampling.max_tokens - len(generation.tokens)
        ids = cap.forced(generation.tokens)
        if left <= len(ids):
            self._closed(1)
            return Piece((), at, StopReason.LENGTH)
        generation.tokens += ids
        # A fresh seed: the old one would draw the same random numbers again.
        sampling = replace(
            generation.sampling, max_tokens=left - len(ids), seed=generation.sampling.seed ^ len(generation.tokens)
        )
        [successor] = self._engine.submit((*generation.prompt, *generation.tokens), [sampling])
        self._running[successor] = generation
        return Piece(ids, at)

    def _end(self, sequence: int, *, closed: bool = True) -> None:
        self._engine.release(sequence)
        del self._running[sequence]
        if closed:
            self._closed(1)

    def _closed(self, count: int) -> None:
        with self._lock:
            self._open -= count

    def _end_all(self, error: ApiError) -> None:
        """Runs after ``_closing`` is set, so that nothing more can arrive."""
        while not self._inbox.empty():
            generation = self._inbox.get()
            if generation is not None:
                self._waiting.append(generation)
        self._send([(generation, error) for generation in (*self._running.values(), *self._waiting)])
        self._running.clear()
        self._waiting.clear()

    @staticmethod
    def _send(batch: Sequence[tuple[Generation, Event]]) -> None:
        """One wake-up per event loop and step, however many requests it reads."""
        for loop in {generation.loop for generation, _ in batch}:
            mine = [(generation, event) for generation, event in batch if generation.loop is loop]
            try:
                loop.call_soon_threadsafe(_put_all, mine)
            except RuntimeError:  # that loop is closed: nobody reads any more
                for generation, _ in mine:
                    generation.cancelled = True


def _put_all(batch: Sequence[tuple[Generation, Event]]) -> None:
    for generation, event in batch:
        generation.put(event)


def _engine_stopped() -> ApiError:
    return ApiError(503, "The model is being stopped.", code="engine_stopped", retry_after=1)


def _engine_failed() -> ApiError:
    return ApiError(500, "The engine failed.", code="engine_failed")
