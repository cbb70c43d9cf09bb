"""Prometheus figures of the gateway; never a user, a key or a prompt among the labels."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from serving.timeline import TurnMetrics

LABELS = ("domain", "model_version", "route")
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_RATIO = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclass(frozen=True)
class Labels:
    """Who served a request; empty strings while that is not known."""

    domain: str
    model_version: str
    route: str

    @property
    def values(self) -> tuple[str, str, str]:
        """In the order of :data:`LABELS`."""
        return (self.domain, self.model_version, self.route)


class GatewayMetrics:
    """All figures, in a collector registry of their own, so that several gateways fit into one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(f"senmon_{name}", text, (*LABELS, *more), registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"senmon_{name}", text, LABELS, buckets=buckets, registry=self.registry)

        self.requests = counter("requests_total", "Requests by how they ended.", "outcome")
        self.input_tokens = counter("input_tokens_total", "Prompt tokens.")
        self.output_tokens = counter("output_tokens_total", "Sampled tokens, thinking included.")
        self.reasoning_tokens = counter("reasoning_tokens_total", "Thinking tokens.")
        self.budget_exhausted = counter("thinking_budget_exhausted_total", "Turns whose thinking was ended by the cap.")
        self.malformed = counter("malformed_turns_total", "Turns that broke the format of the model family.")
        self.latency_budget = counter("latency_budget_requests_total", "Requests with a latency budget.", "outcome")
        self.rejections = counter("admission_rejections_total", "Requests refused before generation.", "reason")
        self.ratio = histogram("thinking_token_ratio", "Thinking tokens over sampled tokens, per turn.", _RATIO)
        self.ttft = histogram("time_to_first_token_seconds", "Arrival to first sampled token.", _SECONDS)
        self.ttfat = histogram("time_to_first_answer_token_seconds", "Arrival to first answer token.", _SECONDS)
        self.tpot = histogram("time_per_output_token_seconds", "Mean time between tokens of a turn.", _TOKEN_SECONDS)
        self.e2e = histogram("e2e_latency_seconds", "Arrival to end of the turn.", _SECONDS)
        self.in_flight = Gauge("senmon_requests_in_flight", "Requests being generated.", LABELS, registry=self.registry)
        self.model_loaded = Gauge(
            "senmon_model_loaded", "1 while a model version is in memory.", LABELS[:2], registry=self.registry
        )

    def refused(self, labels: Labels, reason: str, *, latency_budget: bool) -> None:
        """A request ended before generation; ``reason`` is the code of its error."""
        self.requests.labels(*labels.values, "rejected").inc()
        self.rejections.labels(*labels.values, reason).inc()
        if latency_budget:
            self.latency_budget.labels(*labels.values, "rejected").inc()

    def turn(
        self,
        labels: Labels,
        outcome: str,
        metrics: TurnMetrics,
        *,
        prompt_tokens: int,
        completion_tokens: int,
        reasoning_tokens: int,
        malformed: bool,
    ) -> None:
        """A turn ended; what it had sampled until then counts, whatever the outcome."""
        values = labels.values
        self.requests.labels(*values, outcome).inc()
        self.input_tokens.labels(*values).inc(prompt_tokens)
        self.output_tokens.labels(*values).inc(completion_tokens)
        self.reasoning_tokens.labels(*values).inc(reasoning_tokens)
        self.e2e.labels(*values).observe(metrics.e2e_latency_ms / 1e3)
        if metrics.thinking_budget_exhausted:
            self.budget_exhausted.labels(*values).inc()
        if malformed:
            self.malformed.labels(*values).inc()
        if metrics.latency_budget_ms is not None:
            met = "met" if metrics.latency_budget_met else "missed"
            self.latency_budget.labels(*values, "cancelled" if outcome == "client_closed" else met).inc()
        if metrics.thinking_token_ratio is not None:
            self.ratio.labels(*values).observe(metrics.thinking_token_ratio)
        for histogram, milliseconds in (
            (self.ttft, metrics.time_to_first_token_ms),
            (self.ttfat, metrics.time_to_first_answer_token_ms),
            (self.tpot, metrics.mean_itl_ms),
        ):
            if milliseconds is not None:
                histogram.labels(*values).observe(milliseconds / 1e3)

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)
