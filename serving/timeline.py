"""When things happened in one request, and the figures that follow from it."""

from __future__ import annotations

from dataclasses import dataclass

from infra.records import Record


class TurnMetrics(Record):
    """Timing of one turn; times in milliseconds. What did not happen is None, never 0.

    Names shared with vLLM mean what its "Per-Request Metrics" page says: ``queue_time_ms`` until the engine took
    the request, ``generation_time_ms`` from the first to the last token, ``mean_itl_ms`` that per interval between
    tokens, ``tokens_per_second`` all tokens over the time from the engine's start to the last token. One differs:
    ``time_to_first_token_ms`` starts at arrival, as the caller sees it; it counts any token, thinking included.
    ``time_to_first_answer_token_ms`` the first one of content or of a tool call.
    ``reasoning_time_ms`` runs from the first thinking token to the first answer token (to the last token when
    there is no answer).
    """

    time_to_first_token_ms: float | None
    time_to_first_answer_token_ms: float | None
    e2e_latency_ms: float
    queue_time_ms: float | None
    reasoning_time_ms: float | None
    generation_time_ms: float | None
    mean_itl_ms: float | None
    tokens_per_second: float | None
    thinking_token_ratio: float | None
    thinking_token_budget: int | None
    thinking_budget_exhausted: bool
    latency_budget_ms: float | None
    latency_budget_met: bool | None


@dataclass
class Timeline:
    """Instants of one request in seconds of one monotonic clock."""

    arrived: float
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    first_reasoning: float | None = None
    first_answer: float | None = None

    def token(self, at: float) -> None:
        """A token was sampled."""
        if self.first_token is None:
            self.first_token = at
        self.last_token = at

    def delta(self, at: float, *, reasoning: bool) -> None:
        """A piece of thinking, of content or of a tool call became visible."""
        if reasoning:
            if self.first_reasoning is None:
                self.first_reasoning = at
        elif self.first_answer is None:
            self.first_answer = at

    def metrics(
        self,
        *,
        ended: float,
        completion_tokens: int,
        reasoning_tokens: int,
        thinking_budget: int | None,
        thinking_exhausted: bool,
        latency_budget: float | None,
    ) -> TurnMetrics:
        """Figures of the finished turn; ``latency_budget`` in seconds."""
        reasoning_end = self.last_token if self.first_answer is None else self.first_answer
        generation = _between(self.first_token, self.last_token)
        intervals = completion_tokens - 1
        inference = _between(self.started, self.last_token)
        return TurnMetrics(
            time_to_first_token_ms=_between(self.arrived, self.first_token),
            time_to_first_answer_token_ms=_between(self.arrived, self.first_answer),
            e2e_latency_ms=round((ended - self.arrived) * 1e3, 3),
            queue_time_ms=_between(self.arrived, self.started),
            reasoning_time_ms=_between(self.first_reasoning, reasoning_end),
            generation_time_ms=generation,
            mean_itl_ms=generation / intervals if generation is not None and intervals > 0 else None,
            tokens_per_second=completion_tokens * 1e3 / inference if inference else None,
            thinking_token_ratio=reasoning_tokens / completion_tokens if completion_tokens else None,
            thinking_token_budget=thinking_budget,
            thinking_budget_exhausted=thinking_exhausted,
            latency_budget_ms=None if latency_budget is None else latency_budget * 1e3,
            latency_budget_met=None if latency_budget is None else ended - self.arrived <= latency_budget,
        )


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round((end - start) * 1e3, 3)
