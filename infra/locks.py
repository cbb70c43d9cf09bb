"""Locks between processes, and between machines when the catalog is PostgreSQL: one run per domain at a time.

With a SQLite catalog a lock is a file in ``locks`` beside it (``settings.root/locks`` by default), held through the
operating system; with PostgreSQL it is a session-level advisory lock (so not through a pooler that hands out
connections per transaction). Both vanish with the process that holds them, whatever kills it: there is no stale lock to
clean up.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa
from filelock import FileLock, Timeout
from sqlalchemy.pool import NullPool

from infra.catalog.engine import explained, parse_url, require_driver
from infra.errors import CheckFailed
from infra.hashing import content_hash
from infra.names import check_domain
from infra.settings import Settings

POLL_SECONDS = 0.1
SESSION_SETTINGS = (
    # A machine that vanishes sends no goodbye: the server shall notice within some 30 s.
    "tcp_keepalives_idle = 10",
    "tcp_keepalives_interval = 5",
    "tcp_keepalives_count = 4",
    # A session that holds a lock idles for hours.
    "idle_session_timeout = 0",
)


class HeldLock(ABC):
    """A lock that this process holds."""

    @abstractmethod
    def set_run(self, run_id: str) -> None:
        """Tells others, who are refused, which run holds the lock."""

    @abstractmethod
    def check(self) -> None:
        """Raises :class:`CheckFailed` if the lock was lost (the connection to PostgreSQL broke)."""


@contextmanager
def domain_lock(settings: Settings, domain: str, *, run_id: str = "", wait_s: float = 0.0) -> Iterator[HeldLock]:
    """Holds the domain: no second run of it can start, on any process that shares the catalog.

    ``run_id`` is shown to whoever is refused (later through :meth:`HeldLock.set_run`); ``wait_s`` says how long to wait
    for another holder, 0 refuses at once.

    Raises:
        CheckFailed: another process holds it; names its pid, host and run.
    """
    with exclusive(settings, f"domain-{check_domain(domain)}", run_id=run_id, wait_s=wait_s) as held:
        yield held


@contextmanager
def exclusive(settings: Settings, name: str, *, run_id: str = "", wait_s: float = 0.0) -> Iterator[HeldLock]:
    """As :func:`domain_lock`, for any ``name`` that is also a file name."""
    url = parse_url(settings.catalog)
    if url.drivername == "sqlite":
        # Beside the database: whoever shares the catalog shares the lock, whatever their home folder.
        with _file_lock(Path(str(url.database)).resolve().parent / "locks", name, run_id, wait_s) as held:
            yield held
    else:
        with _advisory_lock(url, name, run_id, wait_s) as held:
            yield held


def _refused(name: str, holder: str, wait_s: float) -> CheckFailed:
    waited = f" (waited {wait_s:g} s)" if wait_s else ""
    return CheckFailed(
        f"{name} is busy: held by {holder}{waited}",
        where=f"lock {name}",
        fix="wait until it ends, or stop that process; the lock goes with it",
    )


@dataclass(frozen=True)
class _FileHeld(HeldLock):
    holder: Path

    def set_run(self, run_id: str) -> None:
        who = {"pid": os.getpid(), "host": socket.gethostname(), "run": run_id}
        temporary = self.holder.with_name(f".{self.holder.name}.{secrets.token_hex(4)}")
        temporary.write_text(json.dumps(who))
        temporary.replace(self.holder)

    def check(self) -> None:
        """The operating system keeps a file lock for as long as the process lives."""


@contextmanager
def _file_lock(folder: Path, name: str, run_id: str, wait_s: float) -> Iterator[HeldLock]:
    folder.mkdir(parents=True, exist_ok=True)
    # Without flock (some network drives) the library would fall back to a marker file, which outlives kill -9.
    lock = FileLock(folder / f"{name}.lock", fallback_to_soft=False)
    held = _FileHeld(folder / f"{name}.holder.json")
    try:
        lock.acquire(timeout=wait_s, poll_interval=POLL_SECONDS)
    except Timeout:
        raise _refused(name, _file_holder(held.holder), wait_s) from None
    try:
        held.set_run(run_id)
        yield held
    finally:
        held.holder.unlink(missing_ok=True)
        lock.release()


def _file_holder(path: Path) -> str:
    try:
        who = json.loads(path.read_text())
    except (OSError, ValueError):
        return "another process (just starting)"
    return f"pid {who['pid']} on {who['host']}" + (f", run {who['run']}" if who["run"] else "")


HOLDER_QUERY = sa.text(
    "SELECT a.application_name FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid"
    " WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1"
    " AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    " AND l.classid::bigint = (CAST(:key AS bigint) >> 32) & 4294967295"
    " AND l.objid::bigint = CAST(:key AS bigint) & 4294967295"
)


@dataclass(frozen=True)
class _AdvisoryHeld(HeldLock):
    connection: sa.Connection
    name: str

    def set_run(self, run_id: str) -> None:
        # PostgreSQL keeps 63 bytes.
        label = f"senmon pid {os.getpid()} on {socket.gethostname()[:16]}" + (f", run {run_id}" if run_id else "")
        self.connection.execute(sa.text("SELECT set_config('application_name', :label, false)"), {"label": label})

    def check(self) -> None:
        try:
            self.connection.execute(sa.text("SELECT 1"))
        except sa.exc.DBAPIError as error:
            raise CheckFailed(
                f"the lock {self.name} is lost: the connection to the catalog broke",
                where=f"lock {self.name}",
                fix="resume the run; another process may hold the domain now",
            ) from error


@contextmanager
def _advisory_lock(url: sa.URL, name: str, run_id: str, wait_s: float) -> Iterator[HeldLock]:
    key = int(content_hash(["senmon-lock", name])[:16], 16) - (1 << 63)  # signed 64 bits
    require_driver()
    engine = sa.create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with explained(url):
        connection = engine.connect()
    try:
        with explained(url):
            held = _AdvisoryHeld(connection, name)
            held.set_run(run_id)
            for setting in SESSION_SETTINGS:
                connection.execute(sa.text(f"SET {setting}"))
            deadline = time.monotonic() + wait_s
            attempt = sa.text("SELECT pg_try_advisory_lock(:key)")
            while not connection.execute(attempt, {"key": key}).scalar_one():
                if time.monotonic() >= deadline:
                    found = connection.execute(HOLDER_QUERY, {"key": key}).scalar()
                    holder = str(found).removeprefix("senmon ") if found else "another process (just starting)"
                    raise _refused(name, holder, wait_s)
                time.sleep(POLL_SECONDS)
        yield held
    finally:
        # Ending the session releases the lock, also where the connection is broken already.
        with suppress(sa.exc.DBAPIError):
            connection.close()
        engine.dispose()
