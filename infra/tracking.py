"""Experiment tracking in MLflow: one experiment per domain, one MLflow run per pipeline run or stage."""

from __future__ import annotations

import json
import logging
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.errors import CheckFailed, SenmonError, UsageError
from infra.mlflow_client import experiment_id, explained, open_client
from infra.names import check_domain
from infra.settings import Settings

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

FLUSH_SECONDS = 2.0
BATCH = 1000  # metrics per call; MLflow's limit, as are the two below
BATCH_PARAMS = 100
PARAM_LENGTH = 6000
METRIC_NAME = re.compile(r"[\w\-. /:]{1,250}")
UNDEFINED_TAG = "undefined."

_log = logging.getLogger(__name__)


class TrackedRun:
    """A run that is being tracked; safe to use from several threads. Made by :meth:`Tracker.run`."""

    def __init__(self, client: MlflowClient, settings: Settings, run: Run) -> None:
        self._client = client
        self._settings = settings
        self._lock = threading.Lock()
        self._buffer: list[Metric] = []
        self._flushed = time.monotonic()
        tags: dict[str, str] = run.data.tags
        self._undefined = Counter(
            {name.removeprefix(UNDEFINED_TAG): int(n) for name, n in tags.items() if name.startswith(UNDEFINED_TAG)}
        )
        self._undefined_changed: set[str] = set()
        self.run_id: str = run.info.run_id

    def metrics(self, values: Mapping[str, float | None], step: int) -> None:
        """Logs ``values`` at ``step``, buffered (about 2 s or 1,000 values).

        A value that is undefined (None, NaN or infinite) is not logged: it would poison every mean. The tag
        ``undefined.<name>`` counts it instead. A store that is away for a moment loses nothing: the buffer is kept.

        Raises:
            UsageError: a name that MLflow would refuse.
        """
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        for name in values:
            if METRIC_NAME.fullmatch(name) is None:
                raise UsageError(
                    f"{name!r} cannot name a metric",
                    where=f"MLflow run {self.run_id}",
                    fix="use letters, digits, '_', '-', '.', '/', ':' and spaces, at most 250",
                )
        with self._lock:
            for name, value in values.items():
                if value is not None and math.isfinite(value):
                    self._buffer.append(Metric(name, float(value), now, step))
                else:
                    self._undefined[name] += 1
                    self._undefined_changed.add(name)
            if len(self._buffer) >= BATCH or time.monotonic() - self._flushed >= FLUSH_SECONDS:
                try:
                    self._send()
                except SenmonError as error:
                    _log.warning("metrics kept for the next attempt: %s", error)

    def flush(self) -> None:
        """Sends what is buffered; :class:`CheckFailed` if the store does not take it (it stays buffered)."""
        with self._lock:
            self._send()

    def tag(self, name: str, value: str) -> None:
        """Sets a tag."""
        with explained(self._settings):
            self._client.set_tag(self.run_id, name, value)

    def artifact(self, path: Path, folder: str | None = None) -> None:
        """Copies one file into the run's artifacts (below ``folder``)."""
        with explained(self._settings):
            self._client.log_artifact(self.run_id, str(path), folder)

    def artifacts(self, directory: Path, folder: str | None = None) -> None:
        """Copies a directory's content into the run's artifacts (below ``folder``)."""
        with explained(self._settings):
            self._client.log_artifacts(self.run_id, str(directory), folder)

    def _send(self) -> None:
        from mlflow.entities import RunTag

        self._flushed = time.monotonic()
        with explained(self._settings):
            # A batch leaves the buffer only when stored. Sent twice it is stored once: its timestamps are fixed.
            while batch := self._buffer[:BATCH]:
                self._client.log_batch(self.run_id, metrics=batch)
                del self._buffer[: len(batch)]
            if self._undefined_changed:
                names = sorted(self._undefined_changed)[:BATCH_PARAMS]
                tags = [RunTag(UNDEFINED_TAG + name, str(self._undefined[name])) for name in names]
                self._client.log_batch(self.run_id, tags=tags)
                self._undefined_changed.difference_update(names)


class Tracker:
    """Writes runs to ``settings.tracking``: SQLite below the home folder, or a MLflow server."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client = open_client(settings)

    def find(self, domain: str, run_name: str) -> str | None:
        """The id of the newest MLflow run with this name, to resume it; None if there is none."""
        experiment = experiment_id(self._client, self._settings, check_domain(domain))
        quoted = run_name.replace("'", "''")
        with explained(self._settings):
            found = self._client.search_runs(
                [experiment],
                filter_string=f"attributes.run_name = '{quoted}'",
                max_results=1,
                order_by=["attributes.start_time DESC"],
            )
        return str(found[0].info.run_id) if found else None

    @contextmanager
    def run(
        self,
        domain: str,
        run_name: str,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        *,
        run_id: str | None = None,
    ) -> Iterator[TrackedRun]:
        """A run of the domain's experiment; ``run_id`` resumes one.

        It ends FINISHED; FAILED when the block raises (tag ``error`` says what); KILLED when it is interrupted (Ctrl-C,
        exit, cancelled). Nested ``params`` are flattened with dots.

        Raises:
            UsageError: there is no run ``run_id``.
            CheckFailed: MLflow is away; or a resumed run has other parameters than it began with.
        """
        check_domain(domain)
        run = self._create(domain, run_name, tags) if run_id is None else self._resume(run_id, tags)
        tracked = TrackedRun(self._client, self._settings, run)
        try:
            self._params(run, flatten(params))
            yield tracked
            tracked.flush()
        except BaseException as error:
            self._end_badly(tracked, error)
            raise
        with explained(self._settings):
            self._client.set_terminated(tracked.run_id, "FINISHED")

    def _create(self, domain: str, run_name: str, tags: Mapping[str, str]) -> Run:
        experiment = experiment_id(self._client, self._settings, domain)
        with explained(self._settings):
            return self._client.create_run(experiment, tags=dict(tags), run_name=run_name)

    def _resume(self, run_id: str, tags: Mapping[str, str]) -> Run:
        from mlflow.entities import RunTag
        from mlflow.exceptions import MlflowException

        with explained(self._settings):
            try:
                self._client.get_run(run_id)
            except MlflowException as error:
                if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                    raise
                raise UsageError(
                    "MLflow has no such run to resume",
                    where=f"MLflow run {run_id}",
                    fix="check the id and SENMON_TRACKING_URI",
                ) from error
            self._client.update_run(run_id, status="RUNNING")
            self._client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])
            return self._client.get_run(run_id)

    def _params(self, run: Run, params: dict[str, str]) -> None:
        from mlflow.entities import Param

        known: dict[str, str] = run.data.params
        changed = [name for name, value in params.items() if name in known and known[name] != value]
        if changed:
            raise CheckFailed(
                f"a resumed run has other parameters than it began with: {', '.join(changed[:10])}",
                where=f"MLflow run {run.info.run_id}",
                fix="resume with the same configuration, or start a new run",
            )
        new = [Param(name, value) for name, value in params.items() if name not in known]
        with explained(self._settings):
            for start in range(0, len(new), BATCH_PARAMS):
                self._client.log_batch(run.info.run_id, params=new[start : start + BATCH_PARAMS])

    def _end_badly(self, tracked: TrackedRun, error: BaseException) -> None:
        """Never hides ``error``, the cause, behind a tracking problem."""
        try:
            tracked.tag("error", f"{type(error).__name__}: {error}"[:1000])
            tracked.flush()
        except SenmonError as problem:
            _log.warning("the end of the run is incomplete in MLflow: %s", problem)
        try:
            with explained(self._settings):
                status = "FAILED" if isinstance(error, Exception) else "KILLED"
                self._client.set_terminated(tracked.run_id, status)
        except SenmonError as problem:
            _log.warning("the run stays open in MLflow: %s", problem)


def flatten(params: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """``{"rl": {"lr": 1e-3}}`` → ``{"rl.lr": "0.001"}``; lists become JSON; cut at MLflow's length limit."""
    flat: dict[str, str] = {}
    for name, value in params.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            text = json.dumps(value, default=str) if isinstance(value, list | tuple) else str(value)
            flat[f"{prefix}{name}"] = text[:PARAM_LENGTH]
    return flat
