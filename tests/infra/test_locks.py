"""One run per domain: refusal with a name, no stale lock after kill -9, never two holders."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sqlalchemy as sa

from infra.catalog import Catalog
from infra.errors import CheckFailed, UsageError
from infra.locks import domain_lock
from infra.settings import Settings


@pytest.fixture(params=["sqlite", "postgresql"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    url = str(request.getfixturevalue("postgres_url")) if request.param == "postgresql" else ""
    return Settings(home=tmp_path / "home", catalog_url=url)


HOLDER = """
import sys, time
from pathlib import Path
from infra.locks import domain_lock
from infra.settings import Settings
with domain_lock(Settings(home=Path(sys.argv[1]), catalog_url=sys.argv[2]), "billing") as lock:
    lock.set_run("20261201-031500123-ab12")
    print("held", flush=True)
    sys.stdin.readline()
"""

COUNTER = """
import sys, time
from pathlib import Path
from infra.locks import domain_lock
from infra.settings import Settings
folder = Path(sys.argv[3])
for _ in range(8):
    with domain_lock(Settings(home=Path(sys.argv[1]), catalog_url=sys.argv[2]), "billing", wait_s=60):
        inside = folder / "inside"
        inside.mkdir()  # fails if somebody else is in
        total = folder / "total"
        count = int(total.read_text())
        time.sleep(0.005)
        total.write_text(str(count + 1))
        inside.rmdir()
"""


def start(code: str, settings: Settings, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, str(settings.home), settings.catalog_url, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def hold(settings: Settings) -> subprocess.Popen[str]:
    holder = start(HOLDER, settings)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def test_a_second_process_is_refused_by_name(settings: Settings) -> None:
    holder = hold(settings)
    began = time.monotonic()
    with pytest.raises(CheckFailed) as caught, domain_lock(settings, "billing"):
        pass
    assert time.monotonic() - began < 2
    message = str(caught.value)
    assert f"pid {holder.pid} on {socket.gethostname()[:16]}" in message
    assert "run 20261201-031500123-ab12" in message
    assert holder.poll() is None
    with domain_lock(settings, "support"):
        pass  # another domain is free
    holder.communicate("go\n", timeout=30)
    assert holder.returncode == 0
    with domain_lock(settings, "billing") as lock:
        lock.check()


def test_kill_9_frees_the_lock(settings: Settings) -> None:
    holder = hold(settings)
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    began = time.monotonic()
    with domain_lock(settings, "billing", wait_s=10):
        assert time.monotonic() - began < 3
    holder.communicate()


def test_waiting_ends_when_the_holder_ends(settings: Settings) -> None:
    holder = hold(settings)
    with pytest.raises(CheckFailed, match=r"waited 0\.3 s"), domain_lock(settings, "billing", wait_s=0.3):
        pass
    assert holder.stdin is not None
    holder.stdin.write("go\n")
    holder.stdin.flush()
    with domain_lock(settings, "billing", wait_s=30):
        pass
    holder.communicate(timeout=30)


def test_two_processes_are_never_inside_at_once(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "total").write_text("0")
    workers = [start(COUNTER, settings, str(tmp_path)) for _ in range(2)]
    results = [worker.communicate(timeout=120) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], results
    assert (tmp_path / "total").read_text() == "16"


def test_the_lock_is_not_reentrant_and_is_freed_by_an_error(settings: Settings) -> None:
    with domain_lock(settings, "billing", run_id="r1"):
        with pytest.raises(CheckFailed, match=f"pid {os.getpid()} .*run r1"), domain_lock(settings, "billing"):
            pass
        with pytest.raises(CheckFailed), domain_lock(settings, "billing", wait_s=0.2):
            pass
    with pytest.raises(ZeroDivisionError), domain_lock(settings, "billing"):
        _ = 1 / 0
    with domain_lock(settings, "billing"):
        pass


def test_a_name_that_is_no_file_name_is_refused(settings: Settings) -> None:
    with pytest.raises(UsageError), domain_lock(settings, "../billing"):
        pass


def test_a_lost_connection_is_a_lost_lock(postgres_url: str, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, catalog_url=postgres_url)
    engine = sa.create_engine(postgres_url, isolation_level="AUTOCOMMIT")
    with domain_lock(settings, "billing") as lock:
        lock.check()
        with engine.connect() as connection:
            connection.exec_driver_sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'senmon pid%%'"
            )
        with pytest.raises(CheckFailed, match="is lost"):
            lock.check()
    engine.dispose()


def test_the_lock_does_not_stand_in_the_catalogs_way(settings: Settings) -> None:
    with domain_lock(settings, "billing") as lock, Catalog.open(settings.catalog) as catalog:
        run = catalog.start_run("billing", "s", {})
        lock.set_run(run.run_id)
        with pytest.raises(CheckFailed, match=run.run_id), domain_lock(settings, "billing"):
            pass
