from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.catalog import Catalog, Promotion
from infra.errors import CheckFailed
from infra.registry import ModelVersion, Registry
from infra.settings import Settings
from pipelines.promotion import move, previous_production, production_metrics, promote, rollback, stages_by_ledger

RULES = [{"metric": "rl.success", "min": 0.5, "min_gain": 0.0}]


@pytest.fixture
def catalog(mlflow_settings: Settings) -> Iterator[Catalog]:
    with Catalog.open(mlflow_settings.catalog) as opened:
        yield opened


@pytest.fixture
def registry(mlflow_settings: Settings) -> Registry:
    return Registry(mlflow_settings)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    policy = tmp_path / "policy"
    policy.mkdir()
    (policy / "config.json").write_text("{}")
    return policy


def made(
    registry: Registry, catalog: Catalog, folder: Path, success: float | None, evaluated: int = 10
) -> ModelVersion:
    """A version whose run measured ``success``."""
    run = catalog.start_run("billing", "hash", {"spec": {"gates": {"promotion": RULES}}})
    output = {"content": "x", "metrics": {"rl.success": success}, "evaluated": evaluated}
    catalog.save_stage(run.run_id, "gate", "inputs", output)
    return registry.register("billing", folder, key=run.run_id, tags={"run_id": run.run_id})


def entry(version: int, to: str, gate: bool = True) -> Promotion:
    passed = {"passed": True} if gate else {}
    return Promotion(
        key=f"{version}{to}", domain="d", version=version, from_stage="x", to_stage=to, who="w", why="y", gate=passed
    )


def test_a_repeated_move_moves_and_writes_once(registry: Registry, catalog: Catalog, folder: Path):
    version = made(registry, catalog, folder, 0.9).version
    entries = [
        move(registry, catalog, "billing", version, "staging", who="w", why="y", gate={"passed": True}, key="k")
        for _ in range(2)
    ]
    assert entries[0] == entries[1]
    assert len(catalog.promotions("billing")) == 1
    assert registry.resolve("billing", "staging").version == version


def test_a_crash_between_registry_and_ledger_is_completed_by_the_repetition(
    registry: Registry, catalog: Catalog, folder: Path
):
    version = made(registry, catalog, folder, 0.9).version
    registry.set_stage("billing", version, "production")
    done = move(registry, catalog, "billing", version, "production", who="w", why="y", gate={}, key="k")
    assert (done.from_stage, done.to_stage) == ("none", "production")
    assert len(catalog.promotions("billing")) == 1


def test_promote_asks_the_gate_and_compares_with_production(
    mlflow_settings: Settings, registry: Registry, catalog: Catalog, folder: Path
):
    good, worse, better = (made(registry, catalog, folder, success) for success in (0.8, 0.7, 0.85))
    assert production_metrics(registry, catalog, "billing") is None
    first = promote(mlflow_settings, registry, catalog, "billing", "production", str(good.version))
    assert first.gate["passed"] is True
    assert production_metrics(registry, catalog, "billing") == {"rl.success": 0.8}

    with pytest.raises(CheckFailed, match="gain_too_small"):
        promote(mlflow_settings, registry, catalog, "billing", "production", str(worse.version))
    assert registry.resolve("billing", "production").version == good.version

    promote(mlflow_settings, registry, catalog, "billing", "production", str(better.version))
    assert registry.resolve("billing", "production").version == better.version
    assert [(e.version, e.to_stage) for e in catalog.promotions("billing")] == [
        (good.version, "production"),
        (better.version, "production"),
    ]
    with pytest.raises(CheckFailed, match="already"):
        promote(mlflow_settings, registry, catalog, "billing", "production", str(better.version))


@pytest.mark.parametrize(("success", "evaluated"), [(None, 10), (0.9, 0), (0.1, 10)])
def test_promote_refuses_and_nothing_moves(
    mlflow_settings: Settings,
    registry: Registry,
    catalog: Catalog,
    folder: Path,
    success: float | None,
    evaluated: int,
):
    version = made(registry, catalog, folder, success, evaluated)
    with pytest.raises(CheckFailed, match="gate promotion said no"):
        promote(mlflow_settings, registry, catalog, "billing", "production", str(version.version))
    assert catalog.promotions("billing") == []
    assert registry.get("billing", version.version).stage == "none"


def test_a_version_that_no_run_made_is_not_promoted(
    mlflow_settings: Settings, registry: Registry, catalog: Catalog, folder: Path
):
    version = registry.register("billing", folder, key="by hand", tags={})
    with pytest.raises(CheckFailed, match="not in the catalog"):
        promote(mlflow_settings, registry, catalog, "billing", "production", str(version.version))


def test_rollback_restores_the_version_before_and_goes_back_once_per_call(
    mlflow_settings: Settings, registry: Registry, catalog: Catalog, folder: Path
):
    versions = [made(registry, catalog, folder, success).version for success in (0.6, 0.7, 0.8)]
    for version in versions:
        promote(mlflow_settings, registry, catalog, "billing", "production", str(version))
    for expected in (versions[1], versions[0]):
        done = rollback(mlflow_settings, registry, catalog, "billing", "too slow")
        assert (done.version, done.why) == (expected, "too slow")
        assert registry.resolve("billing", "production").version == expected
    with pytest.raises(CheckFailed, match="no other version in production"):
        rollback(mlflow_settings, registry, catalog, "billing", "again")
    assert registry.resolve("billing", "production").version == versions[0]


def test_rollback_refuses_a_version_whose_files_were_altered(
    mlflow_settings: Settings, registry: Registry, catalog: Catalog, folder: Path
):
    for success in (0.6, 0.7):
        version = made(registry, catalog, folder, success)
        promote(mlflow_settings, registry, catalog, "billing", "production", str(version.version))
    (registry.download(registry.get("billing", 1)) / "config.json").write_text('{"other": 1}')
    with pytest.raises(CheckFailed, match="not those that were registered"):
        rollback(mlflow_settings, registry, catalog, "billing", "x")
    assert registry.resolve("billing", "production").version == 2


@pytest.mark.parametrize("damage", ["altered", "gone"])
def test_a_version_whose_files_are_altered_or_gone_moves_nowhere(
    mlflow_settings: Settings, registry: Registry, catalog: Catalog, folder: Path, damage: str
):
    version = made(registry, catalog, folder, 0.9)
    config = registry.download(version) / "config.json"
    if damage == "altered":
        config.write_text('{"other": 1}')
    else:
        config.unlink()
    with pytest.raises(CheckFailed, match="files are"):
        promote(mlflow_settings, registry, catalog, "billing", "production", str(version.version))
    with pytest.raises(CheckFailed, match="files are"):  # as the promote stage of a run does it
        move(registry, catalog, "billing", version.version, "production", who="w", why="y", gate={}, key="k")
    assert registry.get("billing", version.version).stage == "none"
    assert catalog.promotions("billing") == []


def test_the_ledger_alone_tells_where_every_version_is():
    ledger = [
        entry(1, "staging"),
        entry(1, "production"),
        entry(2, "staging"),
        entry(2, "production"),
        entry(3, "staging"),
    ]
    assert stages_by_ledger(ledger) == {1: "archived", 2: "production", 3: "staging"}


def test_previous_production_skips_what_was_rolled_back():
    one, two, three = entry(1, "production"), entry(2, "production"), entry(3, "production")
    back_to_one = entry(1, "production", gate=False)
    assert previous_production([one], 1) is None
    assert previous_production([one, two], 2) == 1
    assert previous_production([one, two, back_to_one], 1) is None
    assert previous_production([one, two, back_to_one, three], 3) == 1
    assert previous_production([one, two, one], 1) == 2, "promoted again through the gate: not an undo"
    assert previous_production([entry(1, "staging")], 1) is None
