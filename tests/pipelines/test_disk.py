"""A full disk, as the libraries that write report it."""

from __future__ import annotations

import errno
import shutil
import sqlite3
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from infra.catalog import Catalog
from infra.errors import CheckFailed
from infra.locks import domain_lock
from infra.settings import Settings
from pipelines.disk import disk_full
from pipelines.interruption import Interruption
from pipelines.runner import Interrupted, _Run
from pipelines.spec import load_domain

Usage = namedtuple("Usage", "total used free")


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    try:
        raise error from cause
    except Exception as caught:
        return caught


def writing_to_a_full_device() -> OSError:
    with pytest.raises(OSError) as caught, Path("/dev/full").open("w") as file:  # noqa: PT012
        file.write("x")
        file.flush()
    return caught.value


FULL = OSError(errno.ENOSPC, "No space left on device", "/data/policy.partial/model.safetensors")


@pytest.mark.parametrize(
    ("error", "where"),
    [
        (writing_to_a_full_device(), None),
        (FULL, FULL.filename),
        (raised(RuntimeError("unexpected pos 704 vs 598"), FULL), FULL.filename),
        (raised(CheckFailed("MLflow: no"), sqlite3.OperationalError("database or disk is full")), None),
        (shutil.Error([("a", "b", "[Errno 28] No space left on device: 'a' -> 'b'")]), None),
        (ValueError("Error while serializing: I/O error: No space left on device (os error 28)"), None),
    ],
)
def test_every_librarys_way_to_say_it(tmp_path: Path, error: Exception, where: str | None):
    told = disk_full(error, tmp_path / "run" / "not yet made", "go on")
    assert told is not None
    assert told.what.startswith("the disk is full: ")
    assert told.where == (where or str(tmp_path))
    assert told.fix == "free some space, then go on"


def test_other_errors_are_no_full_disk_whatever_they_quote(tmp_path: Path):
    rows = CheckFailed("row 5: 'printer says: disk is full', not allowed")
    for error in (rows, ValueError("disk is full"), OSError(errno.EACCES, "Permission denied", "x")):
        assert disk_full(error, tmp_path, "go on") is None


def test_an_error_that_says_nothing_is_explained_by_a_disk_without_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9, 0))
    assert disk_full(RuntimeError("basic_ios::clear: iostream error"), tmp_path, "go on") is not None
    assert disk_full(CheckFailed("gate said no"), tmp_path, "go on") is None, "it is explained already"


@pytest.fixture
def unrecordable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    settings = Settings(home=tmp_path / "home", catalog_url="", tracking_uri="")
    domain = load_domain("arithmetic")

    def finish(*_: Any) -> None:
        raise CheckFailed("the catalog cannot be written, the disk is full")

    with Catalog.open(settings.catalog) as catalog, domain_lock(settings, domain.name) as lock:
        run = catalog.start_run(domain.name, domain.spec_hash, {})
        monkeypatch.setattr(catalog, "finish_run", finish)

        def end_with(error: BaseException) -> BaseException:
            def stages(_: Any) -> Any:
                raise error

            monkeypatch.setattr(_Run, "_stages", stages)
            with pytest.raises((CheckFailed, Interrupted)) as caught:
                _Run(settings, catalog, domain, run, (), lock, Interruption()).execute()
            assert catalog.run(run.run_id).unfinished, "it can be resumed"
            return caught.value

        yield end_with


def test_the_first_cause_is_told_also_where_the_failure_cannot_be_recorded(unrecordable: Any):
    told = unrecordable(raised(RuntimeError("unexpected pos"), FULL))
    assert told.what.startswith("the disk is full")
    assert told.where == FULL.filename
    assert told.fix == "free some space, then senmon run arithmetic --resume"
    assert unrecordable(CheckFailed("rows are bad")).what == "rows are bad"
    assert "IndexError: x" in unrecordable(IndexError("x")).what
    assert isinstance(unrecordable(KeyboardInterrupt()), Interrupted)
