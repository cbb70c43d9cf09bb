"""The one way to MLflow: quiet, no telemetry, its schema created once, artifacts below the home folder."""

from __future__ import annotations

import os
import sqlite3
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import sqlalchemy as sa
from filelock import FileLock

from infra.errors import CheckFailed, UsageError
from infra.locks import exclusive
from infra.settings import Settings

if TYPE_CHECKING:
    from mlflow import MlflowClient

SCHEMA_SECONDS = 300.0
PROBE_SECONDS = 10.0
BUSY_SECONDS = 30.0


def served(settings: Settings) -> bool:
    """Whether MLflow is a server of its own (HTTP), which keeps its artifacts itself."""
    return settings.tracking.startswith(("http://", "https://"))


def open_client(settings: Settings) -> MlflowClient:
    """A client of ``settings.tracking`` for runs and registry; the embedded store is created on first use.

    Raises:
        UsageError: the URI is no tracking URI that MLflow understands.
        CheckFailed: the server does not answer, or the database has another schema.
    """
    # Read by MLflow at import; it must not call home, nor talk on the user's terminal.
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ.setdefault("DO_NOT_TRACK", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    if served(settings):
        _probe(settings.tracking)
    from mlflow import MlflowClient

    with explained(settings), _schema_lock(settings):
        client = MlflowClient(tracking_uri=settings.tracking, registry_uri=settings.tracking)
        client.search_experiments(max_results=1)
    return client


@contextmanager
def explained(settings: Settings) -> Iterator[None]:
    """Turns MLflow's exceptions into :class:`CheckFailed` that says where the store is."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        old = "out-of-date database schema" in str(error)
        fix = "back it up, then run: mlflow db upgrade <SENMON_TRACKING_URI>" if old else "check SENMON_TRACKING_URI"
        raise CheckFailed(f"MLflow: {str(error).splitlines()[0]}", where=_shown(settings), fix=fix) from error


def experiment_id(client: MlflowClient, settings: Settings, domain: str) -> str:
    """The id of the domain's experiment, created if it is missing (also by several processes at once).

    Raises:
        CheckFailed: the experiment was deleted in MLflow, which keeps its name taken.
    """
    from mlflow.exceptions import MlflowException

    location = None if served(settings) else (settings.root / "artifacts" / domain).as_uri()
    with explained(settings):
        found = client.get_experiment_by_name(domain)
        if found is None:
            try:
                return str(client.create_experiment(domain, artifact_location=location))
            except MlflowException as error:
                found = client.get_experiment_by_name(domain)
                if found is None:
                    raise error
    if found.lifecycle_stage != "active":
        raise CheckFailed(
            f"the MLflow experiment {domain!r} was deleted",
            where=_shown(settings),
            fix=f"restore it: mlflow experiments restore --experiment-id {found.experiment_id}",
        )
    return str(found.experiment_id)


def local_path(uri: str) -> Path | None:
    """The folder that a ``file:`` URI or a plain path names; None for any other scheme."""
    parsed = urllib.parse.urlparse(uri)
    return Path(urllib.request.url2pathname(parsed.path)) if parsed.scheme in ("", "file") else None


@contextmanager
def _schema_lock(settings: Settings) -> Iterator[None]:
    """MLflow creates its tables when a client is made, unguarded: two processes at once would break each other."""
    if served(settings):
        yield
        return
    try:
        url = sa.make_url(settings.tracking)
    except sa.exc.ArgumentError as error:
        raise UsageError(
            "the MLflow tracking URI cannot be read",
            where="SENMON_TRACKING_URI",
            fix="use sqlite:////path/to/mlflow.db, postgresql://… or http://host:port",
        ) from error
    if url.drivername != "sqlite":
        with exclusive(settings, "mlflow-schema", wait_s=SCHEMA_SECONDS):
            yield
        return
    path = Path(str(url.database))
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock", timeout=SCHEMA_SECONDS, fallback_to_soft=False):
        if not path.exists():
            _create(path)
        try:
            with closing(sqlite3.connect(path, timeout=BUSY_SECONDS)) as connection:
                # Readers and writers do not block each other in WAL, and the mode stays with the file.
                connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.DatabaseError as error:
            raise CheckFailed(
                f"the MLflow database cannot be opened: {error}",
                where=str(path),
                fix="restore it from a backup; or move it away: a new one is made, without the versions of the old",
            ) from error
        yield


def _create(path: Path) -> None:
    """Makes a fresh MLflow database elsewhere and moves it into place: MLflow cannot repair one it half made."""
    from mlflow import MlflowClient

    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        made, copy = Path(folder) / "made.db", Path(folder) / "copy.db"
        MlflowClient(tracking_uri=f"sqlite:///{made}").search_experiments(max_results=1)
        with closing(sqlite3.connect(made)) as source, closing(sqlite3.connect(copy)) as target:
            source.backup(target)
        copy.replace(path)


def _probe(uri: str) -> None:
    """One quick look, because MLflow's own client retries for minutes before it says that nobody is there."""
    try:
        # Any answer will do; what may be done there is MLflow's to say.
        httpx.get(f"{uri.rstrip('/')}/health", timeout=PROBE_SECONDS)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CheckFailed(
            f"the MLflow server does not answer: {error}",
            where=uri,
            fix="start it, or correct SENMON_TRACKING_URI (empty = SQLite below SENMON_HOME)",
        ) from error


def _shown(settings: Settings) -> str:
    if served(settings):
        return settings.tracking
    return sa.make_url(settings.tracking).render_as_string(hide_password=True)
