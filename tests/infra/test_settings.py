"""Settings, and where the embedded stores lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.catalog import Catalog
from infra.errors import UsageError
from infra.settings import Settings
from infra.tracking import Tracker


@pytest.mark.parametrize("name", ["what?", "a%20b", "x?mode=ro", "50%ab"])
def test_a_home_that_a_database_url_would_read_differently_is_refused(tmp_path: Path, name: str):
    with pytest.raises(UsageError, match="means something else in a database URL") as caught:
        Settings(home=tmp_path / name)
    assert str(tmp_path / name) in caught.value.where
    assert "SENMON_HOME" in caught.value.fix


def test_the_folder_around_a_relative_home_counts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "what?").mkdir()
    monkeypatch.chdir(tmp_path / "what?")
    with pytest.raises(UsageError, match="database URL"):
        Settings(home=Path(".senmon"))


@pytest.mark.parametrize("name", ["100%", "a b", "é#1", "me@home:x", "a+b&c=d"])
def test_any_other_home_holds_its_stores_itself(tmp_path: Path, name: str):
    settings = Settings(home=tmp_path / name, catalog_url="", tracking_uri="")
    with Catalog.open(settings.catalog) as catalog:
        catalog.start_run("billing", "hash", {})
    assert (tmp_path / name / "catalog.db").is_file()
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_mlflow_and_its_artifacts_stay_below_such_a_home(tmp_path: Path):
    settings = Settings(home=tmp_path / "100% é#1 me@home:x", catalog_url="", tracking_uri="")
    note = tmp_path / "note.txt"
    note.write_text("x")
    with Tracker(settings).run("billing", "run", {}, {}) as tracked:
        tracked.artifact(note)
    assert (settings.root / "mlflow.db").is_file()
    assert len(list((settings.root / "artifacts" / "billing").rglob("note.txt"))) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [settings.root.name, "note.txt"]
