"""Running ``senmon`` as its users do: in a process of its own, against one Prefect server for all tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from infra.catalog import Catalog
from infra.settings import Settings
from pipelines import prefect_env
from pipelines.cli import app
from tests.integration.toy_domain import write_toy_domain

ROOT = Path(__file__).parents[2]
RUN_SECONDS = 240.0


@dataclass(frozen=True)
class Ended:
    """How a command ended; ``result`` is the JSON on the last line of stdout."""

    code: int
    stdout: str
    stderr: str

    @property
    def result(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.stdout.splitlines()[-1])
        return value


@dataclass(frozen=True)
class Loop:
    """A home folder, a toy domain, and the command."""

    home: Path
    domain: Path
    prefect_url: str

    @property
    def settings(self) -> Settings:
        return Settings(home=self.home, catalog_url="", tracking_uri="")

    def catalog(self) -> Catalog:
        return Catalog.open(self.settings.catalog)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "SENMON_HOME": str(self.home),
            "PREFECT_API_URL": self.prefect_url,
            "PREFECT_HOME": str(self.home / "prefect"),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "pipelines.cli", *arguments]
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def end(self, process: subprocess.Popen[str]) -> Ended:
        try:
            stdout, stderr = process.communicate(timeout=RUN_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            stdout, stderr = process.communicate()
            pytest.fail(f"still running after {RUN_SECONDS} s:\n{stderr}")
        return Ended(process.returncode, stdout, stderr)

    def senmon(self, *arguments: str) -> Ended:
        return self.end(self.start(*arguments))

    def run(self, *arguments: str) -> Ended:
        return self.senmon("run", str(self.domain), "--json", *arguments)

    def run_here(self, *arguments: str) -> Ended:
        """The same command in this process, which has the libraries loaded already (ten seconds less)."""
        from prefect.settings import PREFECT_API_URL, temporary_settings

        changed = {"SENMON_HOME": str(self.home), "PREFECT_API_URL": self.prefect_url}
        with patch.dict(os.environ, changed), temporary_settings({PREFECT_API_URL: self.prefect_url}):
            done = CliRunner().invoke(app, ["run", str(self.domain), "--json", *arguments])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return Ended(done.exit_code, done.stdout, done.stderr)

    def started_stage(self, stage: str, before: str | None) -> bool:
        """Whether the newest run has finished ``before`` and not yet ``stage``."""
        if not (self.home / "catalog.db").exists():
            return False
        with self.catalog() as catalog:
            runs = catalog.runs()
            if not runs:
                return False
            finished = {row.stage for row in catalog.stages(runs[-1].run_id)}
        return (before is None or before in finished) and stage not in finished


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 120.0) -> None:
    """Poll until ``condition`` holds; fails when the process ends first."""
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None:
            pytest.fail(f"ended with {process.returncode} before it got there:\n{process.communicate()[1]}")
        if time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"did not get there in {seconds} s:\n{process.communicate()[1]}")
        time.sleep(0.01)


@pytest.fixture(scope="session")
def prefect_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prefect server on a free loopback port, for the whole session (a start takes ten seconds and more)."""
    with prefect_env.server(tmp_path_factory.mktemp("prefect")) as url:
        yield url


@pytest.fixture
def loop(tmp_path: Path, prefect_url: str, mlflow_settings: Settings) -> Loop:
    """A fresh home and a fresh copy of the toy domain."""
    return Loop(mlflow_settings.root, write_toy_domain(tmp_path / "doubling"), prefect_url)
