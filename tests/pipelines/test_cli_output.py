"""What commands print and leave behind: tables, suggestions, words for a damaged catalog."""

from __future__ import annotations

import errno
import json
import logging
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from infra.catalog import Catalog, Promotion
from infra.errors import CheckFailed
from infra.settings import Settings
from pipelines.cli import app
from pipelines.doctor import Check
from pipelines.output import command, set_up_logging
from pipelines.spec import load_domain
from tests.integration.toy_domain import write_toy_domain

ROOT = Path(__file__).parents[2]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    home = tmp_path / "home"
    monkeypatch.setenv("SENMON_HOME", str(home))
    monkeypatch.delenv("SENMON_CATALOG_URL", raising=False)
    return Settings(home=home, catalog_url="")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def last_line(done: Result) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return value


def test_looking_creates_nothing(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SENMON_TRACKING_URI", raising=False)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    assert call("doctor").exit_code == 0
    assert call("domains").exit_code == 0
    assert call("history", "arithmetic").exit_code == 0
    assert call("history", "nosuch").exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_the_history_of_an_unknown_domain_is_bad_input(settings: Settings):
    with Catalog.open(settings.catalog) as catalog:
        catalog.start_run("temperature", "hash", {})
        moved = Promotion(
            key="k", domain="billing", version=1, from_stage="none", to_stage="staging", who="ci", why="test"
        )
        catalog.append_promotion(moved)
    done = call("history", "temprature", "--json")
    assert done.exit_code == 2
    error = last_line(done)["error"]
    assert "did you mean 'temperature'" in error["what"]
    assert "arithmetic, billing, invoice_approval, temperature" in error["fix"]
    for known in ("temperature", "billing", "arithmetic"):
        assert call("history", known, "--json").exit_code == 0
    assert len(last_line(call("history", "billing", "--json"))["promotions"]) == 1


def test_the_history_of_a_folder_that_never_ran_is_empty(settings: Settings, tmp_path: Path):
    folder = write_toy_domain(tmp_path / "toy", tasks=1)
    done = call("history", str(folder), "--json")
    assert (done.exit_code, last_line(done)) == (0, {"domain": "doubling", "promotions": []})


def test_tables_in_a_pipe_have_one_line_per_row(settings: Settings):
    with Catalog.open(settings.catalog) as catalog:
        catalog.start_run("from_a_folder", "hash", {"spec": {"description": "Ran from a folder. " * 9}})
    command = [sys.executable, "-m", "pipelines.cli", "domains"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "COLUMNS": "80"}, capture_output=True, text=True, check=True
    )
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line.strip()}
    described = load_domain("invoice_approval").spec.description
    assert described in lines["invoice_approval"]
    assert "Ran from a folder. Ran from a folder." in lines["from_a_folder"]
    assert "running" in lines["from_a_folder"]


def test_every_column_has_a_header(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    figures = {"domain": "arithmetic", "seconds": 1.5}
    monkeypatch.setattr("pipelines.runner.run_domain", lambda *_: figures)
    assert call("run", "arithmetic").stdout.split()[:2] == ["figure", "value"]
    monkeypatch.setattr("pipelines.doctor.examine", lambda _: [Check(name="python", state="ok", detail="3")])
    assert call("doctor").stdout.split()[:4] == ["state", "what", "found", "fix"]


def test_what_the_gateway_says_is_shown(capsys: pytest.CaptureFixture[str]):
    set_up_logging()
    set_up_logging()
    logging.getLogger("serving.pool").info("model billing: version 3 is ready")
    assert capsys.readouterr().err.count("model billing: version 3 is ready") == 1


def test_errors_name_the_folder_that_the_user_gave(settings: Settings, tmp_path: Path):
    folder = write_toy_domain(tmp_path / "my domain", tasks=1)
    quoted = f"'{folder}'"
    assert load_domain(str(folder)).argument == quoted
    assert load_domain("arithmetic").argument == "arithmetic"
    nothing = last_line(call("run", str(folder), "--resume", "--json"))
    assert nothing["error"]["fix"] == f"start one: senmon run {quoted}"
    middle = last_line(call("run", str(folder), "--stages", "rl..", "--json"))
    assert f"senmon run {quoted} --resume --stages rl.." in middle["error"]["fix"]


def damaged_header(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not a database at all" * 500)


def damaged_pages(path: Path) -> None:
    with Catalog.open(f"sqlite:///{path}") as catalog:
        catalog.start_run("billing", "hash", {})
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [damaged_header, damaged_pages])
def test_a_damaged_catalog_is_told_in_words(settings: Settings, damage: Any):
    damage(settings.root / "catalog.db")
    done = call("domains", "--json")
    assert done.exit_code == 1
    error = last_line(done)["error"]
    assert "the catalog's file is damaged" in error["what"]
    assert str(settings.root / "catalog.db") in error["where"]
    assert "backup" in error["fix"]
    assert "Traceback" not in done.stderr


def test_a_full_disk_is_told_in_words_by_every_command(capsys: pytest.CaptureFixture[str]):
    def fail() -> None:
        with command(as_json=True):
            raise OSError(errno.ENOSPC, "No space left on device", "/data/x")

    with pytest.raises(typer.Exit) as ended:
        fail()
    assert ended.value.exit_code == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {
        "error": {
            "what": "the disk is full: [Errno 28] No space left on device: '/data/x'",
            "where": "/data/x",
            "fix": "free some space, then repeat the command",
        },
        "exit_code": 1,
    }
    assert "Traceback" not in printed.err


def test_a_catalog_without_space_says_so(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    with Catalog.open(settings.catalog) as catalog:
        engine = catalog._engine
        with engine.connect() as connection:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
            connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(CheckFailed, match="the disk is full") as caught:
            catalog.start_run("billing", "hash", {"text": "x" * 100_000})
    assert "--resume" in caught.value.fix
