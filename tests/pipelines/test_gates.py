from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from infra.errors import CheckFailed
from pipelines.gates import GateRule, judge_gate

LATENCY = GateRule(metric="p95_latency_ms", min_gain=5, better="lower")
ACCURACY = GateRule(metric="accuracy", min_gain=0.01)


def passes(rule: GateRule, value: float, production: float) -> bool:
    report = judge_gate("g", [rule], {rule.metric: value}, evaluated=10, production={rule.metric: production})
    return report.passed


@pytest.mark.parametrize(("value", "accepted"), [(99, False), (95, True), (105, False)])
def test_lower_is_better_asks_for_a_fall(value: float, accepted: bool):
    assert passes(LATENCY, value, 100) is accepted


@pytest.mark.parametrize(("value", "accepted"), [(0.80, False), (0.81, True), (0.79, False), (0.809, False)])
def test_higher_is_better_asks_for_a_rise(value: float, accepted: bool):
    assert passes(ACCURACY, value, 0.80) is accepted


def test_nan_infinite_missing_and_empty_never_pass_and_all_are_listed():
    rules = [GateRule(metric=name, min=0) for name in ("accuracy", "latency", "ratio", "okay")]
    metrics = {"accuracy": math.nan, "latency": math.inf, "okay": 1.0, "none": None}
    report = judge_gate("promotion", rules, metrics, evaluated=7)
    assert [result.reasons for result in report.results] == [("non_finite",), ("non_finite",), ("missing",), ()]
    assert not report.passed
    with pytest.raises(CheckFailed) as caught:
        report.raise_on_failure()
    assert all(name in caught.value.what for name in ("accuracy", "latency", "ratio"))
    assert "okay" not in caught.value.what
    assert report.payload()["results"][0]["value"] is None


@pytest.mark.parametrize("evaluated", [0, None, -1])
def test_an_empty_evaluation_fails_even_with_good_figures(evaluated: int | None):
    report = judge_gate("g", [GateRule(metric="x", min=0)], {"x": 1.0}, evaluated=evaluated)
    assert report.results[0].reasons == ("empty_eval",)
    assert not report.passed


def test_a_gate_without_rules_does_not_pass():
    report = judge_gate("g", [], {"x": 1.0}, evaluated=5)
    with pytest.raises(CheckFailed, match="no rules"):
        report.raise_on_failure()


def test_bounds_are_inclusive_and_reasons_say_which_side():
    rule = GateRule(metric="ratio", min=0.2, max=0.6)
    verdicts = [judge_gate("g", [rule], {"ratio": v}, evaluated=1).results[0].reasons for v in (0.1, 0.2, 0.6, 0.7)]
    assert verdicts == [("below_min",), (), (), ("above_max",)]


def test_a_gain_over_production_needs_nothing_when_production_is_empty_but_its_figure_when_it_is_not():
    metrics = {"accuracy": 0.5}
    assert judge_gate("g", [ACCURACY], metrics, evaluated=1, production=None).passed
    report = judge_gate("g", [ACCURACY], metrics, evaluated=1, production={})
    assert report.results[0].reasons == ("missing_baseline",)
    report = judge_gate("g", [ACCURACY], metrics, evaluated=1, production={"accuracy": math.nan})
    assert report.results[0].reasons == ("missing_baseline",)


def test_a_gain_over_another_metric_of_the_run():
    rule = GateRule(metric="rl.success", min_gain=0.1, over="sft.success")
    assert judge_gate("g", [rule], {"rl.success": 0.9, "sft.success": 0.5}, evaluated=1).passed
    assert not judge_gate("g", [rule], {"rl.success": 0.55, "sft.success": 0.5}, evaluated=1).passed
    assert judge_gate("g", [rule], {"rl.success": 0.9}, evaluated=1).results[0].reasons == ("missing_baseline",)


@pytest.mark.parametrize(
    "fields", [{}, {"min": math.nan}, {"max": math.inf}, {"min": 2, "max": 1}, {"min_gain": math.nan}, {"minimum": 1}]
)
def test_a_rule_that_checks_nothing_or_cannot_pass_is_refused(fields: dict[str, float]):
    with pytest.raises(ValidationError):
        GateRule.model_validate({"metric": "x", **fields})


@given(
    value=st.floats(allow_nan=True, allow_infinity=True),
    low=st.floats(-1e6, 1e6),
    width=st.floats(0, 1e6),
    production=st.floats(allow_nan=True, allow_infinity=True) | st.none(),
)
def test_whatever_passes_is_finite_and_inside_the_bounds(
    value: float, low: float, width: float, production: float | None
):
    rule = GateRule(metric="x", min=low, max=low + width, min_gain=0.5)
    report = judge_gate("g", [rule], {"x": value}, evaluated=3, production={"x": production})
    if report.passed:
        assert math.isfinite(value)
        assert low <= value <= low + width
        assert production is not None
        assert math.isfinite(production)
        assert value - production >= 0.5 - 1e-8
