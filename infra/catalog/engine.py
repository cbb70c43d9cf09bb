"""Connecting to the catalog's database and bringing its schema up to date, safely from many processes at once."""

from __future__ import annotations

import errno
import logging
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import sqlalchemy as sa
from filelock import FileLock
from sqlalchemy.pool import ConnectionPoolEntry

from infra.errors import CheckFailed, UsageError
from infra.hashing import canonical_json

BUSY_SECONDS = 30
MIGRATION_LOCK = 0x53656E6D6F6E  # "Senmon": the advisory lock that serialises upgrades on PostgreSQL
DRIVERS = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg", "postgresql+psycopg": "postgresql+psycopg"}


def parse_url(url: str) -> sa.URL:
    """The catalog's URL with its driver named.

    Raises:
        UsageError: not a URL, a database other than SQLite and PostgreSQL, or SQLite without a file.
    """
    fix = "set SENMON_CATALOG_URL to sqlite:////path/to/catalog.db or postgresql+psycopg://user@host/database"
    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError) as error:
        raise UsageError("the catalog URL cannot be read", where="SENMON_CATALOG_URL", fix=fix) from error
    if parsed.drivername not in DRIVERS:
        raise UsageError(f"the catalog cannot live in {parsed.drivername!r}", where=str(parsed), fix=fix)
    if parsed.drivername == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise UsageError("a SQLite catalog needs a file", where=str(parsed), fix=fix)
    return parsed.set(drivername=DRIVERS[parsed.drivername])


def connect(url: sa.URL) -> sa.Engine:
    """An engine for ``url`` (see :func:`parse_url`); JSON columns refuse NaN (``ValueError``).

    On SQLite a transaction takes the write lock at its start unless it is marked read-only with
    ``execution_options(read_only=True)``: a transaction which reads first and writes later would fail with "database is
    locked" whenever another process writes in between, without waiting.
    """
    if url.drivername != "sqlite":
        require_driver()
        return sa.create_engine(url, json_serializer=canonical_json, pool_pre_ping=True)
    engine = sa.create_engine(url, json_serializer=canonical_json, connect_args={"timeout": BUSY_SECONDS})

    def prepare(connection: sqlite3.Connection, _entry: ConnectionPoolEntry) -> None:
        connection.isolation_level = None  # BEGIN is ours, see `begin`
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = FULL")

    def begin(connection: sa.Connection) -> None:
        read_only = connection.get_execution_options().get("read_only", False)
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")

    sa.event.listen(engine, "connect", prepare)
    sa.event.listen(engine, "begin", begin)
    return engine


def require_driver() -> None:
    """Raises :class:`UsageError` if the PostgreSQL driver is not installed."""
    if find_spec("psycopg") is None:
        raise UsageError(
            "PostgreSQL needs the psycopg driver, which is not installed",
            where="SENMON_CATALOG_URL",
            fix="pip install 'senmon[postgres]'",
        )


@contextmanager
def explained(url: sa.URL) -> Iterator[None]:
    """Turns a database that is away, locked, read-only, full or damaged into an error that says so.

    Raises:
        CheckFailed: the database cannot be used as it is; what violates a constraint is left as it is.
    """
    try:
        yield
    except (sa.exc.DatabaseError, sqlite3.DatabaseError, OSError) as error:
        if isinstance(error, sa.exc.IntegrityError | sa.exc.ProgrammingError | sa.exc.DataError):
            raise
        raise _unusable(url, error.orig if isinstance(error, sa.exc.DatabaseError) else error) from error


def _unusable(url: sa.URL, error: BaseException | None) -> CheckFailed:
    cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
    what, fix = (
        "the catalog does not answer",
        "check SENMON_CATALOG_URL, that the database runs, and that this user may write there",
    )
    code = error.sqlite_errorcode & 0xFF if isinstance(error, sqlite3.Error) else None  # without the extended part
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        what = "the catalog's file is damaged"
        fix = "restore it from a backup; or move it away, and an empty one is made (runs and ledger start anew)"
    elif code == sqlite3.SQLITE_FULL or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
        what = "the catalog cannot be written, the disk is full"
        fix = "free some space, then repeat the command; a run is continued by senmon run DOMAIN --resume"
    return CheckFailed(f"{what}: {cause}", where=url.render_as_string(hide_password=True), fix=fix)


def upgrade(engine: sa.Engine) -> None:
    """Runs the migrations up to the newest, in one transaction; of several processes one does, the others wait."""
    if engine.dialect.name == "sqlite":
        path = Path(str(engine.url.database))
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=4 * BUSY_SECONDS, fallback_to_soft=False):
            # WAL is a property of the file; switching it is not covered by the busy timeout, hence inside the lock.
            raw = engine.raw_connection()
            try:
                raw.cursor().execute("PRAGMA journal_mode = WAL")
            finally:
                raw.close()
            _upgrade(engine)
    else:
        _upgrade(engine)


def _upgrade(engine: sa.Engine) -> None:
    from alembic import command
    from alembic.config import Config
    from alembic.runtime.migration import MigrationContext
    from alembic.script import ScriptDirectory
    from alembic.util import CommandError

    logging.getLogger("alembic.runtime").setLevel(logging.WARNING)
    config = Config()
    config.set_main_option("script_location", "infra.catalog:migrations")
    head = ScriptDirectory.from_config(config).get_current_head()
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
        current = MigrationContext.configure(connection).get_current_revision()
        if current == head:
            return
        config.attributes["connection"] = connection
        try:
            command.upgrade(config, "head")
        except CommandError as error:
            raise CheckFailed(
                f"the catalog has schema {current}, which this version of senmon does not know (it knows {head})",
                where=engine.url.render_as_string(hide_password=True),
                fix="upgrade senmon, or point SENMON_CATALOG_URL at another database",
            ) from error
