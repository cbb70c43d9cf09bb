"""Ctrl-C and SIGTERM: raised, remembered, and asked for before anything goes on."""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from infra.catalog import Catalog
from infra.settings import Settings
from pipelines.flow import run_stage
from pipelines.interruption import SIGNALS, Interruption
from pipelines.spec import load_domain
from pipelines.stages import Output, Results, RunContext, Stage

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Gone:
    """Something that can be referred to weakly."""


def dropped(number: int) -> None:
    """Send a signal while a weak reference's callback runs: what the handler raises is dropped."""
    gone = Gone()
    kept = weakref.ref(gone, lambda _: os.kill(os.getpid(), number))
    del gone
    assert kept() is None


@contextmanager
def handling(number: int, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


class Figures:
    """Takes metrics as MLflow would."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def metrics(self, values: dict[str, float], step: int) -> None:
        self.steps.append(step)


@pytest.fixture
def context(tmp_path: Path) -> Iterator[RunContext]:
    settings = Settings(home=tmp_path / "home", catalog_url="", tracking_uri="")
    domain = load_domain("arithmetic")
    with Catalog.open(settings.catalog) as catalog:
        run = catalog.start_run(domain.name, domain.spec_hash, {})
        yield RunContext(settings, catalog, domain, run, cast(Any, Figures()), registry=cast(Any, None))


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_raises_and_is_remembered_and_the_old_handler_comes_back(number: int):
    before = signal.getsignal(number)
    interruption = Interruption()
    with pytest.raises(KeyboardInterrupt), interruption.armed():  # noqa: PT012
        os.kill(os.getpid(), number)
        pytest.fail("the signal was not heard")
    assert interruption.requested
    assert signal.getsignal(number) is before
    with pytest.raises(KeyboardInterrupt):
        interruption.check()


@pytest.mark.parametrize("number", SIGNALS)
def test_a_dropped_signal_is_remembered_also_below_another_handler(number: int):
    interruption = Interruption()
    with interruption.armed(), handling(number, signal.SIG_DFL), interruption.armed():
        dropped(number)
    assert interruption.requested


def test_a_signal_that_the_process_ignores_stays_ignored():
    interruption = Interruption()
    with handling(signal.SIGINT, signal.SIG_IGN), interruption.armed():
        os.kill(os.getpid(), signal.SIGINT)
    interruption.check()


def test_a_stage_during_which_a_signal_was_dropped_is_not_recorded_and_no_other_begins(context: RunContext):
    ran: list[str] = []

    def body(context: RunContext, results: Results) -> Output:
        ran.append("first")
        dropped(signal.SIGTERM)
        return {"content": "x"}

    def other(context: RunContext, results: Results) -> Output:
        ran.append("second")
        return {"content": "y"}

    with context.interruption.armed():
        with pytest.raises(KeyboardInterrupt):
            run_stage(context, Stage("sft", (), (), body), {})
        with pytest.raises(KeyboardInterrupt):
            run_stage(context, Stage("promote", (), (), other), {})
    assert ran == ["first"]
    assert context.catalog.stages(context.run.run_id) == []


def test_training_stops_at_the_step_after_a_dropped_signal(context: RunContext):
    def body(context: RunContext, results: Results) -> Output:
        for step in range(1, 100):
            if step == 3:
                dropped(signal.SIGINT)
            context.metrics({"sft.loss": 0.5}, step)
        return {"content": "x"}

    with context.interruption.armed(), pytest.raises(KeyboardInterrupt):
        run_stage(context, Stage("sft", (), (), body), {})
    assert cast(Any, context.tracked).steps == [1, 2]
