"""Gates: rules as data, compared so that an undefined figure never passes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from infra.errors import CheckFailed
from infra.records import Config, Record

PRODUCTION = "production"
ROUNDING = 1e-9
"""Slack for decimal fractions: 0.81 − 0.80 counts as a gain of 0.01."""

Reason = Literal["missing", "non_finite", "empty_eval", "below_min", "above_max", "gain_too_small", "missing_baseline"]


class GateRule(Config):
    """What one metric must fulfil.

    ``min`` and ``max`` are inclusive. ``min_gain`` asks for an improvement over ``over``: another metric of the same
    run, or ``production`` (the same metric of the version in production; without such a version there is nothing to
    improve on and the rule holds). An improvement is a rise where higher is better, a fall where lower is better.
    """

    metric: str = Field(min_length=1)
    min: float | None = Field(default=None, allow_inf_nan=False)
    max: float | None = Field(default=None, allow_inf_nan=False)
    min_gain: float | None = Field(default=None, allow_inf_nan=False)
    over: str = PRODUCTION
    better: Literal["higher", "lower"] = "higher"

    @model_validator(mode="after")
    def _something_to_check(self) -> Self:
        if self.min is None and self.max is None and self.min_gain is None:
            raise ValueError("a gate rule needs at least one of min, max and min_gain")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min ({self.min}) exceeds max ({self.max}): nothing can pass")
        return self


class GateResult(Record):
    """How one rule came out; ``reasons`` is empty when it passed. Values that are not finite are kept as None."""

    metric: str
    passed: bool
    value: float | None
    baseline: float | None = None
    reasons: tuple[Reason, ...] = ()
    wanted: str


class GateRejected(CheckFailed):
    """A gate's rules said no; anything else that fails in a gate's stage can be repaired and resumed."""


class GateReport(Record):
    """All rules of one gate; it passed only if there is at least one rule and every rule passed."""

    gate: str
    passed: bool
    results: tuple[GateResult, ...]

    def raise_on_failure(self) -> None:
        """Raise :class:`GateRejected` which lists every failing metric."""
        if self.passed:
            return
        failed = [
            f"{r.metric} = {_shown(r.value)}, wanted {r.wanted} ({', '.join(r.reasons)})"
            for r in self.results
            if r.reasons
        ]
        lines = "\n".join(f"    {line}" for line in failed) or "    the gate has no rules"
        raise GateRejected(
            f"gate {self.gate} said no:\n{lines}",
            where=f"gate {self.gate}",
            fix="look at the run's metrics; change data or training, or the gate in domain.yaml if it asks too much",
        )


def judge_gate(
    gate: str,
    rules: Sequence[GateRule],
    metrics: Mapping[str, float | None],
    *,
    evaluated: int | None,
    production: Mapping[str, float | None] | None = None,
) -> GateReport:
    """Compare metrics with a gate's rules.

    Args:
        metrics: the candidate's figures; None means "not defined" and counts as missing.
        evaluated: number of judged episodes or demonstrations behind them; 0 or unknown fails every rule.
        production: the figures of the version in production, None when there is no such version.
    """
    results = tuple(_judge(rule, metrics, evaluated, production) for rule in rules)
    return GateReport(gate=gate, passed=bool(results) and all(r.passed for r in results), results=results)


def _judge(
    rule: GateRule,
    metrics: Mapping[str, float | None],
    evaluated: int | None,
    production: Mapping[str, float | None] | None,
) -> GateResult:
    value = metrics.get(rule.metric)
    reasons: list[Reason] = []
    baseline: float | None = None
    if not evaluated or evaluated < 0:
        reasons.append("empty_eval")
    if value is None:
        reasons.append("missing")
    elif not math.isfinite(value):
        reasons.append("non_finite")
    else:
        # Written as `not (…)` so that no comparison with NaN can pass.
        if rule.min is not None and not value >= rule.min:
            reasons.append("below_min")
        if rule.max is not None and not value <= rule.max:
            reasons.append("above_max")
        if rule.min_gain is not None and not (rule.over == PRODUCTION and production is None):
            baseline = (production or {}).get(rule.metric) if rule.over == PRODUCTION else metrics.get(rule.over)
            if baseline is None or not math.isfinite(baseline):
                reasons.append("missing_baseline")
            else:
                gain = value - baseline if rule.better == "higher" else baseline - value
                if not gain >= rule.min_gain - ROUNDING:
                    reasons.append("gain_too_small")
    return GateResult(
        metric=rule.metric,
        passed=not reasons,
        value=_finite(value),
        baseline=_finite(baseline),
        reasons=tuple(reasons),
        wanted=_wanted(rule),
    )


def _wanted(rule: GateRule) -> str:
    parts = []
    if rule.min is not None:
        parts.append(f">= {rule.min:g}")
    if rule.max is not None:
        parts.append(f"<= {rule.max:g}")
    if rule.min_gain is not None:
        parts.append(f"{rule.better} than {rule.over} by {rule.min_gain:g} or more")
    return " and ".join(parts)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _shown(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4g}"
