"""Tracking: buffered metrics, honest ends, no undefined numbers, no calls home, a safe first start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from infra.errors import CheckFailed, UsageError
from infra.mlflow_client import local_path, open_client
from infra.settings import Settings
from infra.tracking import Tracker, flatten


@pytest.fixture
def client(mlflow_settings: Settings) -> MlflowClient:
    return open_client(mlflow_settings)


@pytest.fixture
def tracker(mlflow_settings: Settings) -> Tracker:
    return Tracker(mlflow_settings)


def test_a_run_is_stored_with_all_it_was_given(
    tracker: Tracker, client: MlflowClient, mlflow_settings: Settings, tmp_path: Path
) -> None:
    (tmp_path / "report.html").write_text("<p>fine")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("a")
    params = {"rl": {"lr": 1e-3, "steps": 50}, "seeds": [1, 2], "gate": None}
    with tracker.run("billing", "run-1", params, {"commit": "abc"}) as tracked:
        for step in range(30):
            tracked.metrics({"loss": 1 / (step + 1), "reward": step}, step)
        tracked.artifact(tmp_path / "report.html")
        tracked.artifacts(tmp_path / "docs", "docs")
    run = client.get_run(tracked.run_id)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "run-1"
    assert run.data.params == {"rl.lr": "0.001", "rl.steps": "50", "seeds": "[1, 2]", "gate": "None"}
    assert run.data.tags["commit"] == "abc"
    history = client.get_metric_history(tracked.run_id, "loss")
    assert [(m.step, m.value) for m in history] == [(step, 1 / (step + 1)) for step in range(30)]
    folder = local_path(run.info.artifact_uri)
    assert folder is not None
    assert folder.is_relative_to(mlflow_settings.root / "artifacts")
    assert (folder / "report.html").read_text() == "<p>fine"
    assert (folder / "docs" / "a.txt").read_text() == "a"


def test_metrics_are_sent_in_batches(tracker: Tracker, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    original = MlflowClient.log_batch

    def counting(self: MlflowClient, run_id: str, metrics=(), **rest: object):  # type: ignore[no-untyped-def]
        sizes.append(len(metrics))
        return original(self, run_id, metrics=metrics, **rest)

    with tracker.run("billing", "r", {}, {}) as tracked:
        monkeypatch.setattr(MlflowClient, "log_batch", counting)
        for step in range(600):
            tracked.metrics({"a": step, "b": step, "c": step, "d": step}, step)
    assert sum(sizes) == 2400
    assert len(sizes) <= 6
    assert max(sizes) == 1000


def test_the_buffer_is_sent_after_two_seconds(tracker: Tracker, client: MlflowClient) -> None:
    with tracker.run("billing", "r", {}, {}) as tracked:
        tracked.metrics({"a": 1.0}, 0)
        assert client.get_run(tracked.run_id).data.metrics == {}
        tracked._flushed = time.monotonic() - 2.1
        tracked.metrics({"a": 2.0}, 1)
        assert client.get_run(tracked.run_id).data.metrics == {"a": 2.0}


def test_undefined_values_are_counted_not_logged(tracker: Tracker, client: MlflowClient) -> None:
    with tracker.run("billing", "r", {}, {}) as tracked:
        for step, value in enumerate([1.0, float("nan"), None, float("inf"), 3.0]):
            tracked.metrics({"reward": value, "other": 0.5}, step)
    with tracker.run("billing", "r", {}, {}, run_id=tracked.run_id) as tracked:
        tracked.metrics({"reward": None}, 5)
    run = client.get_run(tracked.run_id)
    assert [m.value for m in client.get_metric_history(tracked.run_id, "reward")] == [1.0, 3.0]
    assert run.data.tags["undefined.reward"] == "4"
    assert "undefined.other" not in run.data.tags


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("boom"), "FAILED"),
        (CheckFailed("gate said no"), "FAILED"),
        (KeyboardInterrupt(), "KILLED"),
        (SystemExit(1), "KILLED"),
    ],
)
def test_a_run_that_ends_badly_says_so_and_keeps_its_metrics(
    tracker: Tracker, client: MlflowClient, error: BaseException, status: str
) -> None:
    with pytest.raises(type(error)), tracker.run("billing", "r", {}, {}) as tracked:  # noqa: PT012
        tracked.metrics({"loss": 0.5}, 3)
        raise error
    run = client.get_run(tracked.run_id)
    assert run.info.status == status
    assert run.data.metrics == {"loss": 0.5}
    assert run.data.tags["error"].startswith(type(error).__name__)


def test_a_store_that_is_away_loses_no_metric(
    tracker: Tracker, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = MlflowClient.log_batch
    calls: list[int] = []

    def flaky(self: MlflowClient, run_id: str, metrics=(), **rest: object):  # type: ignore[no-untyped-def]
        calls.append(len(metrics))
        if len(calls) == 1:
            original(self, run_id, metrics=metrics, **rest)  # stored, but the answer is lost
            raise MlflowException("connection reset")
        if len(calls) == 2:
            raise MlflowException("503")
        return original(self, run_id, metrics=metrics, **rest)

    with tracker.run("billing", "r", {}, {}) as tracked:
        monkeypatch.setattr(MlflowClient, "log_batch", flaky)
        for step in range(10):
            if step in (3, 6):
                tracked._flushed = time.monotonic() - 3
            tracked.metrics({"loss": float(step)}, step)
    assert calls == [4, 7, 10]
    history = client.get_metric_history(tracked.run_id, "loss")
    assert [m.step for m in history] == list(range(10))


def test_the_cause_of_a_failure_is_not_hidden_by_the_store(tracker: Tracker, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object, **__: object) -> None:
        raise MlflowException("gone")

    with pytest.raises(ZeroDivisionError), tracker.run("billing", "r", {}, {}) as tracked:  # noqa: PT012
        tracked.metrics({"loss": 0.5}, 3)
        for name in ("log_batch", "set_tag", "set_terminated"):
            monkeypatch.setattr(MlflowClient, name, away)
        _ = 1 / 0


def test_unsent_metrics_fail_a_run_that_would_else_be_finished(
    tracker: Tracker, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object, **__: object) -> None:
        raise MlflowException("disk full")

    with pytest.raises(CheckFailed, match="disk full"), tracker.run("billing", "r", {}, {}) as tracked:  # noqa: PT012
        tracked.metrics({"loss": 0.5}, 3)
        monkeypatch.setattr(MlflowClient, "log_batch", away)
    assert client.get_run(tracked.run_id).info.status == "FAILED"


def test_a_resumed_run_goes_on_where_it_was(tracker: Tracker, client: MlflowClient) -> None:
    with pytest.raises(ValueError), tracker.run("billing", "run-7", {"lr": 1}, {}) as first:  # noqa: PT012
        first.metrics({"loss": 2.0}, 0)
        raise ValueError
    found = tracker.find("billing", "run-7")
    assert found == first.run_id
    assert tracker.find("billing", "run-8") is None
    with tracker.run("billing", "run-7", {"lr": 1, "extra": "x"}, {"resumed": "1"}, run_id=found) as second:
        assert client.get_run(second.run_id).info.status == "RUNNING"
        second.metrics({"loss": 1.0}, 1)
    run = client.get_run(first.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params == {"lr": "1", "extra": "x"}
    assert [m.value for m in client.get_metric_history(first.run_id, "loss")] == [2.0, 1.0]
    with pytest.raises(CheckFailed, match="other parameters than it began with: lr"):
        tracker.run("billing", "run-7", {"lr": 2}, {}, run_id=found).__enter__()
    with pytest.raises(UsageError, match="no such run"):
        tracker.run("billing", "run-7", {}, {}, run_id="0" * 32).__enter__()


def test_bad_names_are_bad_input(tracker: Tracker) -> None:
    with pytest.raises(UsageError, match="domain name"):
        tracker.run("No Such/Name", "r", {}, {}).__enter__()
    with pytest.raises(UsageError, match="metric"), tracker.run("billing", "r", {}, {}) as tracked:
        tracked.metrics({"reward[0]": 1.0}, 0)


def test_a_deleted_experiment_is_reported(tracker: Tracker, client: MlflowClient) -> None:
    with tracker.run("billing", "r", {}, {}):
        pass
    found = client.get_experiment_by_name("billing")
    assert found is not None
    client.delete_experiment(found.experiment_id)
    with pytest.raises(CheckFailed, match="was deleted") as caught:
        tracker.run("billing", "r", {}, {}).__enter__()
    assert "restore" in caught.value.fix


def test_flatten_cuts_at_the_limit_of_mlflow() -> None:
    assert flatten({"a": {"b": {"c": True}}, "text": "x" * 7000}) == {"a.b.c": "True", "text": "x" * 6000}


def test_a_server_that_is_away_is_reported_at_once(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(CheckFailed, match="does not answer"):
        Tracker(Settings(home=tmp_path, tracking_uri="http://127.0.0.1:9"))
    assert time.monotonic() - began < 5


def test_a_damaged_database_is_reported_and_left_as_it_is(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    database = settings.root / "mlflow.db"
    database.parent.mkdir(parents=True, exist_ok=True)
    database.write_bytes(b"no database at all" * 100)
    with pytest.raises(CheckFailed, match="file is not a database") as raised:
        open_client(settings)
    assert raised.value.where == str(database)
    assert database.read_bytes() == b"no database at all" * 100


def test_a_database_of_another_mlflow_is_reported(mlflow_settings: Settings) -> None:
    import sqlite3

    with sqlite3.connect(mlflow_settings.root / "mlflow.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '0000'")
    connection.close()
    with pytest.raises(CheckFailed, match="out-of-date") as caught:
        Tracker(mlflow_settings)
    assert "mlflow db upgrade" in caught.value.fix


FIRST_START = """
import socket, sys
from pathlib import Path

reached = []
def connect(self, address):
    reached.append(address)
    raise OSError("no network here")
socket.socket.connect = connect
socket.getaddrinfo = lambda host, *rest, **more: reached.append(host) or []

from infra.settings import Settings
from infra.tracking import Tracker
import infra.registry
assert "mlflow" not in sys.modules, "mlflow is to be imported lazily"
sys.stdin.readline()
tracker = Tracker(Settings(home=Path(sys.argv[1])))
with tracker.run("billing", sys.argv[2], {"a": 1}, {}) as tracked:
    tracked.metrics({"loss": 1.0}, 0)
from mlflow.telemetry.client import get_telemetry_client
from mlflow.telemetry.utils import is_telemetry_disabled
assert is_telemetry_disabled()
assert get_telemetry_client() is None
assert reached == [], reached
"""


def test_processes_that_start_at_once_are_safe_and_quiet_and_call_nobody(tmp_path: Path) -> None:
    hidden = ("PYTEST", "CI", "GITHUB", "MLFLOW", "DO_NOT_TRACK", "SENMON")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    pipe = subprocess.PIPE
    starters = [
        subprocess.Popen(
            [sys.executable, "-c", FIRST_START, str(tmp_path / "home"), f"run-{i}"],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
            env=environment,
        )
        for i in range(2)
    ]
    for starter in starters:
        assert starter.stdin is not None
        starter.stdin.write("go\n")
        starter.stdin.flush()
    results = [starter.communicate(timeout=120) for starter in starters]
    assert [starter.returncode for starter in starters] == [0, 0], results
    assert results == [("", "")] * 2
    client = open_client(Settings(home=tmp_path / "home"))
    experiment = client.get_experiment_by_name("billing")
    assert experiment is not None
    assert {run.info.run_name for run in client.search_runs([experiment.experiment_id])} == {"run-0", "run-1"}


KILLED_FIRST_START = """
import os, signal, sys
from pathlib import Path
from sqlalchemy import event
from sqlalchemy.engine import Engine

@event.listens_for(Engine, "before_cursor_execute")
def crash(connection, cursor, statement, *rest):
    if "latest_metrics" in statement and "CREATE TABLE" in statement:
        os.kill(os.getpid(), signal.SIGKILL)

from infra.mlflow_client import open_client
from infra.settings import Settings
open_client(Settings(home=Path(sys.argv[1])))
"""


def test_a_first_start_that_is_killed_can_be_repeated(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED_FIRST_START, str(tmp_path)], check=False, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with Tracker(Settings(home=tmp_path)).run("billing", "r", {}, {}) as tracked:
        tracked.metrics({"loss": 1.0}, 0)
