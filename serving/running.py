"""One turn being generated: its deltas, its deadline, its accounts; closed exactly once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

from infra.hashing import canonical_json
from infra.inference.engine import StopReason
from serving.errors import ApiError
from serving.observe import GatewayMetrics, Labels
from serving.pool import Lease
from serving.timeline import Timeline, TurnMetrics
from serving.turn import TextDelta, TurnDelta, TurnReader
from serving.worker import Clock, Expired, Generation, Piece, Started

logger = logging.getLogger(__name__)

BUDGET_EXCEEDED = "latency_budget_exceeded"
MALFORMED = "malformed_turn"


@dataclass(frozen=True)
class TurnResult:
    """A finished turn. ``code`` explains an unusual end: the latency budget, or a broken format."""

    turn: TurnReader
    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    finish_reason: str
    code: str | None
    metrics: TurnMetrics


class RunningTurn:
    """Reads one generation to its end.

    Args:
        lease: released when the turn closes.
        generation: the request in the engine.
        metrics: where the turn is counted.
        labels: Prometheus labels of the turn.
        request_id: for the log line.
        arrived: when the request arrived, in seconds of ``clock``.
        latency_budget: seconds from arrival after which the turn is cut, or None.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        lease: Lease,
        generation: Generation,
        metrics: GatewayMetrics,
        labels: Labels,
        request_id: str,
        arrived: float,
        latency_budget: float | None,
        clock: Clock,
    ) -> None:
        self._lease = lease
        self._generation = generation
        self._metrics = metrics
        self._labels = labels
        self._request_id = request_id
        self._clock = clock
        self._budget = latency_budget
        self._timeline = Timeline(arrived)
        self._reader = TurnReader(lease.served.renderer)
        self._stop: StopReason | None = None
        self._expired = False
        self._closed = False
        self._result: TurnResult | None = None
        self._timer: asyncio.TimerHandle | None = None
        metrics.in_flight.labels(*labels.values).inc()
        if latency_budget is not None:
            left = max(0.0, arrived + latency_budget - clock())
            self._timer = asyncio.get_running_loop().call_later(left, generation.expire)

    async def begin(self) -> None:
        """Wait until the engine has taken the request.

        Raises:
            ApiError: it refused it, or the latency budget was spent in the queue.
        """
        while self._timeline.started is None:
            event = await self._generation.next()
            if isinstance(event, Started):
                self._timeline.started = event.at
            elif isinstance(event, ApiError):
                raise event
            elif isinstance(event, Expired):
                raise _budget_spent()

    async def deltas(self) -> AsyncIterator[TurnDelta]:
        """What the model says, until the turn ends; then :meth:`result` is there.

        Raises:
            ApiError: the engine failed, or the latency budget was spent before the first token.
        """
        try:
            await self.begin()
            while self._stop is None and not self._expired:
                for delta in self._read(await self._generation.next()):
                    yield delta
            ended = self._timeline.last_token or self._clock()
            for delta in self._seen(self._reader.finish(), ended):
                yield delta
            if self._expired and not self._reader.tokens:
                raise _budget_spent()
        except Exception as error:
            self.close(error.code if isinstance(error, ApiError) else "internal_error")
            raise
        self.close("budget" if self._expired else "length" if self._stop is StopReason.LENGTH else "ok")

    def result(self) -> TurnResult:
        """The finished turn; only after :meth:`deltas` has ended."""
        assert self._result is not None
        return self._result

    def close(self, outcome: str) -> None:
        """Free the slot, release the model, count and log the turn. Only the first call acts."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._generation.cancel()
        self._result = self._finished()
        self._metrics.in_flight.labels(*self._labels.values).dec()
        self._lease.release()
        self._account(outcome, self._result)

    def _read(self, event: Started | Piece | Expired | ApiError) -> list[TurnDelta]:
        if isinstance(event, ApiError):
            raise event
        if isinstance(event, Expired):
            self._expired = True
            return []
        if not isinstance(event, Piece):
            return []
        out: list[TurnDelta] = []
        for token in event.tokens:
            self._timeline.token(event.at)
            out += self._seen(self._reader.feed(token), event.at)
        if event.finished is StopReason.ABORT:
            raise ApiError(500, "The engine aborted the request.", code="engine_aborted")
        self._stop = event.finished
        return out

    def _seen(self, deltas: list[TurnDelta], at: float) -> list[TurnDelta]:
        for delta in deltas:
            self._timeline.delta(at, reasoning=isinstance(delta, TextDelta) and delta.reasoning)
        return deltas

    def _finished(self) -> TurnResult:
        cap = self._generation.cap
        parsed = self._reader.parsed()
        completion_tokens = len(self._reader.tokens)
        if self._expired:
            code: str | None = BUDGET_EXCEEDED
        else:
            code = MALFORMED if parsed.malformed is not None else None
        stopped = "tool_calls" if self._reader.has_calls else "stop"
        return TurnResult(
            turn=self._reader,
            prompt_tokens=len(self._generation.prompt),
            completion_tokens=completion_tokens,
            reasoning_tokens=parsed.reasoning_tokens,
            finish_reason=stopped if self._stop is StopReason.STOP else "length",
            code=code,
            metrics=self._timeline.metrics(
                ended=self._clock(),
                completion_tokens=completion_tokens,
                reasoning_tokens=parsed.reasoning_tokens,
                thinking_budget=None if cap is None else cap.budget,
                thinking_exhausted=cap is not None and cap.exhausted,
                latency_budget=self._budget,
            ),
        )

    def _account(self, outcome: str, result: TurnResult) -> None:
        self._metrics.turn(
            self._labels,
            outcome,
            result.metrics,
            prompt_tokens=result.prompt_tokens,
            completion_tokens=result.completion_tokens,
            reasoning_tokens=result.reasoning_tokens,
            malformed=result.code == MALFORMED,
        )
        line = {
            "event": "chat_completion",
            "request_id": self._request_id,
            "domain": self._labels.domain,
            "model_version": self._labels.model_version,
            "outcome": outcome,
            "prompt_tokens": result.prompt_tokens,
            "completion_tokens": result.completion_tokens,
            "reasoning_tokens": result.reasoning_tokens,
            "e2e_latency_ms": result.metrics.e2e_latency_ms,
        }
        logger.info(canonical_json(line))


def _budget_spent() -> ApiError:
    return ApiError(504, "The latency budget was spent before the first token.", code=BUDGET_EXCEEDED)
