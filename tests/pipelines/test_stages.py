from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, cast

import pytest

from infra.catalog import Catalog
from infra.errors import CheckFailed, UsageError
from infra.settings import Settings
from pipelines.flow import StageFailed, earlier_results, root_cause, run_stage
from pipelines.spec import Domain, load_domain
from pipelines.stages import STAGES, Output, Results, RunContext, Stage, data_hash, expand, select_stages

NOTHING = cast(Any, None)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home", catalog_url="", tracking_uri="")


@pytest.fixture
def context(settings: Settings) -> Iterator[RunContext]:
    domain = load_domain("arithmetic")
    with Catalog.open(settings.catalog) as catalog:
        run = catalog.start_run(domain.name, domain.spec_hash, {})
        yield RunContext(settings, catalog, domain, run, tracked=NOTHING, registry=NOTHING)


class Counting:
    """A stage body that counts its calls."""

    def __init__(self, fail: Exception | None = None) -> None:
        self.calls = 0
        self.fail = fail

    def __call__(self, context: RunContext, results: Results) -> Output:
        self.calls += 1
        if self.fail is not None:
            raise self.fail
        return {"content": f"made {self.calls}"}


def test_a_finished_stage_is_not_run_again_not_even_by_another_process(context: RunContext):
    body = Counting()
    stage = Stage("sft", (), ("sft",), body)
    first = run_stage(context, stage, {})
    with Catalog.open(context.settings.catalog) as other:
        again = run_stage(replace(context, catalog=other), stage, {})
    assert body.calls == 1
    assert first == again == {"content": "made 1"}


def test_changed_configuration_code_upstream_or_seed_runs_it_again(
    context: RunContext, monkeypatch: pytest.MonkeyPatch
):
    stage = Stage("rl", ("sft",), ("rl",), Counting())
    results = {"sft": {"content": "a", "policy": "/somewhere"}}
    base = stage.inputs_hash(context.domain, results)
    assert stage.inputs_hash(load_domain("arithmetic"), {"sft": {"content": "a", "policy": "/elsewhere"}}) == base
    assert stage.inputs_hash(load_domain("arithmetic", ["sft.max_steps=7"]), results) == base

    changed = {
        "spec": stage.inputs_hash(load_domain("arithmetic", ["rl.steps=3"]), results),
        "seed": stage.inputs_hash(load_domain("arithmetic", ["seed=3"]), results),
        "upstream": stage.inputs_hash(context.domain, {"sft": {"content": "b", "policy": "/somewhere"}}),
        "name": replace(stage, name="evaluate").inputs_hash(context.domain, results),
    }
    monkeypatch.setattr(Domain, "code", {"verifiers.py": "other"})
    changed["code"] = stage.inputs_hash(load_domain("arithmetic"), results)
    assert len({base, *changed.values()}) == 1 + len(changed)


def test_a_stage_whose_inputs_changed_is_run_again(context: RunContext):
    body = Counting()
    stage = Stage("rl", ("sft",), ("rl",), body)
    run_stage(context, stage, {"sft": {"content": "a"}})
    output = run_stage(context, stage, {"sft": {"content": "b"}})
    assert output == {"content": "made 2"}


def test_a_failed_stage_leaves_nothing_and_names_itself(context: RunContext):
    cause = CheckFailed("no", where="here", fix="do")
    body = Counting(cause)
    with pytest.raises(StageFailed) as caught:
        run_stage(context, Stage("gate", (), (), body), {})
    assert root_cause(caught.value) == ("gate", cause)
    assert context.catalog.stages(context.run.run_id) == []
    body.fail = None
    assert run_stage(context, Stage("gate", (), (), body), {}) == {"content": "made 2"}


def test_tidy_comes_after_the_result_is_recorded(context: RunContext):
    recorded = []

    def tidy(context: RunContext) -> None:
        recorded.append(context.catalog.stage_result(context.run.run_id, "sft"))

    stage = Stage("sft", (), (), Counting(), tidy)
    run_stage(context, stage, {})
    assert [row is not None and row.output for row in recorded] == [{"content": "made 1"}]
    run_stage(context, stage, {})
    assert len(recorded) == 2


def test_a_figure_that_is_not_a_number_is_never_recorded(context: RunContext):
    stage = Stage("evaluate", (), (), lambda context, results: {"content": "x", "metrics": {"success": float("nan")}})
    with pytest.raises(CheckFailed):
        run_stage(context, stage, {})
    assert context.catalog.stages(context.run.run_id) == []


def test_starting_in_the_middle_needs_the_earlier_results(context: RunContext):
    with pytest.raises(UsageError, match="needs stage validate, which was not run yet"):
        earlier_results(context, STAGES[1])
    inputs = STAGES[0].inputs_hash(context.domain, {})
    context.catalog.save_stage(context.run.run_id, "validate", inputs, {"content": "data"})
    assert earlier_results(context, STAGES[1]) == {"validate": {"content": "data"}}
    context.catalog.save_stage(context.run.run_id, "validate", "other inputs", {"content": "data"})
    with pytest.raises(UsageError, match="made from other inputs"):
        earlier_results(context, STAGES[1])


@pytest.mark.parametrize(
    ("selection", "promote", "expected"),
    [
        (None, False, "validate snapshot sft sft_gate rl evaluate gate register"),
        (None, True, "validate snapshot sft sft_gate rl evaluate gate register promote"),
        ("..snapshot", False, "validate snapshot"),
        ("rl..", False, "rl evaluate gate register"),
        ("rl..", True, "rl evaluate gate register promote"),
        ("sft..rl", True, "sft sft_gate rl"),
        ("gate", False, "gate"),
    ],
)
def test_selecting_stages(selection: str | None, promote: bool, expected: str):
    assert [stage.name for stage in select_stages(selection, promote)] == expected.split()


@pytest.mark.parametrize(
    ("selection", "problem"), [("rl..sft", "comes after"), ("..regster", "did you mean 'register'"), ("x", "unknown")]
)
def test_selecting_stages_that_are_not_there(selection: str, problem: str):
    with pytest.raises(UsageError, match=problem):
        select_stages(selection, False)


def test_stages_only_need_stages_before_them():
    seen: set[str] = set()
    for stage in STAGES:
        assert set(stage.needs) <= seen
        seen.add(stage.name)


def test_data_hash_sees_every_value_and_the_table():
    rows = [{"id": 1, "day": date(2026, 1, 2), "text": "a"}]
    base = data_hash({"t": rows})
    assert data_hash({"t": [dict(reversed(list(rows[0].items())))]}) == base
    other = {"id": 2, "day": date(2026, 1, 2), "text": "b"}
    assert data_hash({"t": [*rows, other]}) == data_hash({"t": [other, *rows]})
    variants = [
        {"t": [{**rows[0], "id": "1"}]},
        {"t": [{**rows[0], "day": date(2026, 1, 3)}]},
        {"u": rows},
        {"t": rows * 2},
        {"t": rows, "u": []},
    ]
    assert len({base, *map(data_hash, variants)}) == 1 + len(variants)


def test_variables_are_expanded_everywhere_and_unknown_ones_refused():
    options = {"a": "x/${HOME_DIR}", "b": [{"c": "$5 ${HOME_DIR}"}], "d": 3}
    assert expand(options, {"HOME_DIR": "h"}, "here") == {"a": "x/h", "b": [{"c": "$5 h"}], "d": 3}
    with pytest.raises(UsageError, match="HOME_DIR"):
        expand(options, {}, "here")
