"""A real PostgreSQL for tests: ``$SENMON_TEST_POSTGRES_URL`` if set, else a cluster of our own, else a skip."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

VARIABLE = "SENMON_TEST_POSTGRES_URL"
START_SECONDS = 60


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[sa.URL]:
    """URL of a server on which this user may create databases."""
    if given := os.environ.get(VARIABLE):
        yield sa.make_url(given).set(drivername="postgresql+psycopg")
        return
    binaries = find_binaries()
    if binaries is None:
        pytest.skip(f"no PostgreSQL: set {VARIABLE} or install the server (initdb was not found)")
    user = cluster_user()
    if user == "root":
        pytest.skip(f"no PostgreSQL: initdb refuses root and there is no user 'postgres'; set {VARIABLE}")
    with tempfile.TemporaryDirectory(prefix="senmon-postgres-") as name:
        yield from run_cluster(binaries, Path(name), user)


@pytest.fixture
def postgres_url(postgres_server: sa.URL) -> Iterator[str]:
    """URL (with password) of a fresh, empty database, dropped afterwards."""
    name = f"senmon_{secrets.token_hex(6)}"
    admin = sa.create_engine(postgres_server, isolation_level="AUTOCOMMIT", poolclass=sa.pool.NullPool)
    with admin.connect() as connection:
        connection.exec_driver_sql(f'CREATE DATABASE "{name}"')
    yield postgres_server.set(database=name).render_as_string(hide_password=False)
    with admin.connect() as connection:
        connection.exec_driver_sql(f'DROP DATABASE "{name}" WITH (FORCE)')


def find_binaries() -> Path | None:
    """The folder with ``initdb`` and ``postgres``: on the PATH, or where Debian keeps the newest."""
    found = shutil.which("initdb")
    if found:
        return Path(found).resolve().parent
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    return debian[-1].parent if debian else None


def cluster_user() -> str:
    """Who runs the cluster: this user, or ``postgres`` (if there is one) when this user is root."""
    if os.geteuid() != 0:
        return pwd.getpwuid(os.geteuid()).pw_name
    return "postgres" if any(entry.pw_name == "postgres" for entry in pwd.getpwall()) else "root"


def run_cluster(binaries: Path, folder: Path, user: str) -> Iterator[sa.URL]:
    """Creates a cluster below ``folder``, serves it on a free loopback port, stops it afterwards."""
    data, secret = folder / "data", folder / "password"
    password = secrets.token_hex(16)
    secret.write_text(password)
    account = pwd.getpwnam(user)
    other: dict[str, Any] = {} if os.geteuid() != 0 else {"user": user, "group": account.pw_gid, "extra_groups": []}
    if other:
        for path in (folder, secret):
            os.chown(path, account.pw_uid, account.pw_gid)
    options = ["--username=senmon", f"--pwfile={secret}", "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C"]
    subprocess.run(
        [binaries / "initdb", "-D", data, "--no-sync", *options], check=True, capture_output=True, cwd="/", **other
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = ["-c", "fsync=off", "-c", "listen_addresses=127.0.0.1", "-c", f"unix_socket_directories={folder}"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [binaries / "postgres", "-D", data, "-p", str(port), *settings], stdout=log, stderr=log, cwd="/", **other
        )
    try:
        url = sa.URL.create("postgresql+psycopg", "senmon", password, "127.0.0.1", port, "postgres")
        wait_until_up(url, server, folder / "log")
        yield url
    finally:
        server.send_signal(2)  # SIGINT: PostgreSQL's fast shutdown
        server.wait(timeout=START_SECONDS)


def wait_until_up(url: sa.URL, server: subprocess.Popen[bytes], log: Path) -> None:
    """Returns when the server takes connections."""
    deadline = time.monotonic() + START_SECONDS
    plain = url.set(drivername="postgresql").render_as_string(hide_password=False)
    while True:
        try:
            psycopg.connect(plain, connect_timeout=5).close()
            return
        except psycopg.OperationalError:
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"PostgreSQL did not start:\n{log.read_text(errors='replace')}")
            time.sleep(0.1)
