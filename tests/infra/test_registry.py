"""The registry: one version per key, one atomic move per stage, no version lost under concurrency."""

from __future__ import annotations

import multiprocessing
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mlflow import MlflowClient

from infra.catalog import Catalog, Promotion
from infra.errors import CheckFailed, UsageError
from infra.mlflow_client import open_client
from infra.registry import ModelVersion, Registry, VersionNotFound
from infra.settings import Settings
from infra.tracking import Tracker


@pytest.fixture
def registry(mlflow_settings: Settings) -> Registry:
    return Registry(mlflow_settings)


def make_policy(folder: Path, content: str = "weights") -> Path:
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "gpt_oss"}')
    (folder / "sub" / "model.safetensors").write_text(content)
    return folder


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return make_policy(tmp_path / "policy")


def stages(registry: Registry, domain: str = "billing") -> dict[int, str]:
    return {entry.version: entry.stage for entry in registry.versions(domain)}


def register(registry: Registry, policy: Path, count: int) -> list[ModelVersion]:
    return [registry.register("billing", policy, key=f"k{i}", tags={}) for i in range(1, count + 1)]


def test_a_registered_policy_can_be_loaded_by_us_and_by_mlflow(
    registry: Registry, policy: Path, mlflow_settings: Settings
) -> None:
    made = registry.register("billing", policy, key="k1", tags={"snapshot": "abc"})
    assert (made.version, made.stage, made.key, made.tags["snapshot"]) == (1, "none", "k1", "abc")
    shutil.rmtree(policy)  # a copy was kept
    folder = registry.download(registry.resolve("billing", "1"))
    assert folder.is_relative_to(mlflow_settings.root / "artifacts")
    assert (folder / "sub" / "model.safetensors").read_text() == "weights"
    registry.set_stage("billing", 1, "staging")
    uri = open_client(mlflow_settings).get_model_version_by_alias("billing", "staging").source
    assert uri == made.source
    assert registry.domains() == ["billing"]


def test_a_retried_flow_registers_once(registry: Registry, policy: Path) -> None:
    """FL-01: notify() fails once, the flow is retried; the policy is registered once and promoted once."""
    calls: list[str] = []

    def flow() -> ModelVersion:
        made = registry.register("billing", policy, key="billing/data-1/config-1", tags={})
        registry.set_stage("billing", made.version, "staging")
        calls.append("notify")
        if len(calls) == 1:
            raise ConnectionError
        return made

    with pytest.raises(ConnectionError):
        flow()
    assert flow().version == 1
    assert stages(registry) == {1: "staging"}
    other = registry.register("billing", policy, key="billing/data-2/config-1", tags={})
    assert other.version == 2


def test_ten_threads_register_ten_versions(registry: Registry, mlflow_settings: Settings, tmp_path: Path) -> None:
    """RG-02."""
    policies = [make_policy(tmp_path / f"p{i}", f"weights {i}") for i in range(10)]
    registries = [Registry(mlflow_settings) for _ in range(3)]
    start = threading.Barrier(10)

    def work(number: int) -> ModelVersion:
        start.wait()
        return registries[number % 3].register("billing", policies[number], key=f"k{number}", tags={})

    with ThreadPoolExecutor(10) as pool:
        made = list(pool.map(work, range(10)))
    assert sorted(entry.version for entry in made) == list(range(1, 11))
    assert len({entry.run_id for entry in made}) == 10
    assert [entry.version for entry in registry.versions("billing")] == list(range(1, 11))
    for number, entry in enumerate(made):
        text = (registry.download(entry) / "sub" / "model.safetensors").read_text()
        assert text == f"weights {number}"


def test_ten_threads_with_one_key_get_one_version(registry: Registry, policy: Path) -> None:
    start = threading.Barrier(10)

    def work(_: int) -> ModelVersion:
        start.wait()
        return registry.register("billing", policy, key="same", tags={})

    with ThreadPoolExecutor(10) as pool:
        made = list(pool.map(work, range(10)))
    assert {entry.version for entry in made} == {1}
    assert stages(registry) == {1: "none"}


def test_a_deleted_version_leaves_no_stage_behind(registry: Registry, policy: Path, mlflow_settings: Settings) -> None:
    """RG-01, deletion through MLflow itself."""
    register(registry, policy, 3)
    registry.set_stage("billing", 1, "production")
    registry.set_stage("billing", 2, "production")
    registry.set_stage("billing", 3, "staging")
    open_client(mlflow_settings).delete_model_version("billing", "2")
    with pytest.raises(VersionNotFound, match="no version in production"):
        registry.resolve("billing", "production")
    with pytest.raises(VersionNotFound, match="no version 2"):
        registry.resolve("billing", "2")
    assert registry.resolve("billing", "staging").version == 3
    assert (registry.download(registry.resolve("billing", "1")) / "config.json").is_file()
    assert registry.set_stage("billing", 1, "production").stage == "production"
    assert registry.register("billing", policy, key="k4", tags={}).version == 4


def test_stages_move_one_version_out_when_another_moves_in(registry: Registry, policy: Path) -> None:
    register(registry, policy, 3)
    registry.set_stage("billing", 1, "staging")
    registry.set_stage("billing", 1, "production")
    assert stages(registry) == {1: "production", 2: "none", 3: "none"}
    with pytest.raises(VersionNotFound):
        registry.resolve("billing", "staging")
    registry.set_stage("billing", 2, "staging")
    registry.set_stage("billing", 3, "staging")
    assert stages(registry) == {1: "production", 2: "archived", 3: "staging"}
    registry.set_stage("billing", 3, "production")
    assert stages(registry) == {1: "archived", 2: "archived", 3: "production"}
    registry.set_stage("billing", 1, "production")  # roll back
    assert registry.set_stage("billing", 1, "production").stage == "production"
    assert stages(registry) == {1: "production", 2: "archived", 3: "archived"}
    assert {entry.version: entry.tags["stage"] for entry in registry.versions("billing")} == stages(registry)
    with pytest.raises(CheckFailed, match="in production already"):
        registry.set_stage("billing", 1, "staging")
    assert registry.resolve("billing", "production").version == 1
    registry.set_stage("billing", 1, "archived")
    assert stages(registry) == {1: "archived", 2: "archived", 3: "archived"}


def test_readers_always_see_one_production_version(registry: Registry, policy: Path, mlflow_settings: Settings) -> None:
    """RG-03: a reader polls 1,000 times while a writer swaps 100 times; the ledger has every swap."""
    register(registry, policy, 5)
    registry.set_stage("billing", 4, "production")
    seen: list[int] = []
    swapping = threading.Event()

    def poll() -> None:
        reader = Registry(mlflow_settings)
        while len(seen) < 1000 or not swapping.is_set():
            seen.append(reader.resolve("billing", "production").version)

    with Catalog.open(mlflow_settings.catalog) as catalog, ThreadPoolExecutor(1) as pool:
        polling = pool.submit(poll)
        for number in range(100):
            old, new = (4, 5) if number % 2 == 0 else (5, 4)
            moved = registry.set_stage("billing", new, "production")
            entry = {"from_stage": "archived", "to_stage": moved.stage, "who": "t", "why": f"swap of {old}"}
            catalog.append_promotion(
                Promotion.model_validate({"key": f"swap-{number}", "domain": "billing", "version": new, **entry})
            )
        swapping.set()
        polling.result(timeout=120)
        ledger = catalog.promotions("billing")
    assert len(seen) >= 1000
    assert set(seen) == {4, 5}
    assert [entry.version for entry in ledger] == [5, 4] * 50
    assert stages(registry) == {1: "none", 2: "none", 3: "none", 4: "production", 5: "archived"}


CRASH_WRITES = ["set_registered_model_alias", "delete_registered_model_alias", "set_model_version_tag"]


@pytest.mark.parametrize("crash_at", range(1, 5))
@pytest.mark.parametrize("before", [True, False])
def test_a_crash_in_the_middle_of_a_promotion_leaves_the_old_or_the_new_state(
    registry: Registry, policy: Path, monkeypatch: pytest.MonkeyPatch, crash_at: int, before: bool
) -> None:
    """RG-03: version 2 moves from staging to production; the process dies before or after the n-th write."""
    register(registry, policy, 2)
    registry.set_stage("billing", 1, "production")
    registry.set_stage("billing", 2, "staging")
    old, new = {1: "production", 2: "staging"}, {1: "archived", 2: "production"}
    writes: list[str] = []

    class Died(BaseException):
        pass

    def dying(name: str):  # type: ignore[no-untyped-def]
        original = MlflowClient.__dict__[name]

        def write(self: MlflowClient, *arguments: object, **more: object) -> object:
            writes.append(name)
            if before and len(writes) == crash_at:
                raise Died
            result = original(self, *arguments, **more)
            if len(writes) == crash_at:
                raise Died
            return result

        return write

    with monkeypatch.context() as patch:
        for name in CRASH_WRITES:
            patch.setattr(MlflowClient, name, dying(name))
        with pytest.raises(Died):
            registry.set_stage("billing", 2, "production")
    assert len(writes) == crash_at
    expected = old if before and crash_at == 1 else new
    assert stages(registry) == expected
    assert registry.resolve("billing", "production").version == (1 if expected == old else 2)
    if expected == new:
        with pytest.raises(VersionNotFound):
            registry.resolve("billing", "staging")
    registry.set_stage("billing", 2, "production")  # the retry
    assert stages(registry) == new
    assert {entry.version: entry.tags["stage"] for entry in registry.versions("billing")} == new


def log_and_register(settings: Settings, policy: Path, number: int) -> None:
    """One of the eight processes of RG-06."""
    tracker = Tracker(settings)
    with tracker.run("billing", f"run-{number}", {"number": number}, {}) as tracked:
        for step in range(100):
            tracked.metrics({"loss": step / 100}, step)
            if step % 10 == 9:
                tracked.flush()
        Registry(settings).register("billing", policy, key=f"k{number}", tags={}, run_id=tracked.run_id)
        if number == 7:
            raise RuntimeError("the last one fails")


def test_eight_processes_share_one_sqlite_file(mlflow_settings: Settings, policy: Path) -> None:
    """RG-06."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mlflow", "infra.registry", "tests.infra.test_registry"])
    workers = [context.Process(target=log_and_register, args=(mlflow_settings, policy, i)) for i in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=120)
    assert [worker.exitcode for worker in workers] == [0] * 7 + [1]
    client = open_client(mlflow_settings)
    experiment = client.get_experiment_by_name("billing")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    status = {run.info.run_name: run.info.status for run in runs}
    assert status == {f"run-{i}": "FINISHED" if i < 7 else "FAILED" for i in range(8)}
    for run in runs:
        history = client.get_metric_history(run.info.run_id, "loss")
        assert [(m.step, m.value) for m in history] == [(step, step / 100) for step in range(100)]
        assert run.data.params["number"] == run.info.run_name.removeprefix("run-")
    versions = Registry(mlflow_settings).versions("billing")
    assert [entry.version for entry in versions] == list(range(1, 9))
    assert {entry.run_id for entry in versions} == {run.info.run_id for run in runs}


KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from infra.registry import Registry
from infra.settings import Settings
registry = Registry(Settings(home=Path(sys.argv[1])))
original = shutil.copy2
def copy(source, target, **more):
    if str(source).endswith(".safetensors"):
        Path(target).write_text("wei")
        os.kill(os.getpid(), signal.SIGKILL)
    return original(source, target, **more)
shutil.copytree.__kwdefaults__, shutil.copytree.__defaults__ = None, (False, None, copy, False, False)
registry.register("billing", Path(sys.argv[2]), key="k1", tags={})
"""


def test_a_killed_registration_registers_nothing_half(
    registry: Registry, policy: Path, mlflow_settings: Settings
) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(mlflow_settings.home), str(policy)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert registry.versions("billing") == []
    made = registry.register("billing", policy, key="k1", tags={})
    assert made.version == 1
    assert (registry.download(made) / "sub" / "model.safetensors").read_text() == "weights"


def test_altered_and_missing_files_are_found_at_download(registry: Registry, policy: Path) -> None:
    first, second = register(registry, policy, 2)
    weights = registry.download(first) / "sub" / "model.safetensors"
    weights.write_text("weigh")
    with pytest.raises(CheckFailed, match="hash differs"):
        registry.download(first)
    shutil.rmtree(registry.download(second))
    with pytest.raises(CheckFailed, match="are gone"):
        registry.download(second)


def test_nothing_to_find_is_a_typed_error(registry: Registry, policy: Path) -> None:
    assert registry.versions("billing") == []
    assert registry.domains() == []
    for ref in ("production", "staging", "1"):
        with pytest.raises(VersionNotFound) as caught:
            registry.resolve("billing", ref)
        assert "senmon" in caught.value.fix
    with pytest.raises(VersionNotFound):
        registry.set_stage("billing", 1, "staging")
    register(registry, policy, 1)
    with pytest.raises(VersionNotFound):
        registry.resolve("billing", "production")
    for ref in ("champion", "", "-1", "1.0", "²"):
        with pytest.raises(UsageError):
            registry.resolve("billing", ref)


def test_bad_registrations_are_bad_input(registry: Registry, policy: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.json"):
        registry.register("billing", tmp_path / "nowhere", key="k", tags={})
    with pytest.raises(UsageError, match="reserved"):
        registry.register("billing", policy, key="k", tags={"stage": "production"})
    with pytest.raises(UsageError, match="empty key"):
        registry.register("billing", policy, key="", tags={})
    with pytest.raises(UsageError, match="domain name"):
        registry.register("a'b", policy, key="k", tags={})
    assert registry.domains() == []


def test_other_peoples_models_are_not_our_domains(registry: Registry, mlflow_settings: Settings, policy: Path) -> None:
    open_client(mlflow_settings).create_registered_model("somebody-elses")
    register(registry, policy, 1)
    assert registry.domains() == ["billing"]


@pytest.fixture
def server_settings(mlflow_settings: Settings, tmp_path: Path) -> Iterator[Settings]:
    """A MLflow server on loopback which keeps the artifacts itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", mlflow_settings.tracking, "--artifacts-destination", str(tmp_path / "store")]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path, start_new_session=True)
    settings = Settings(home=tmp_path / "client", tracking_uri=f"http://127.0.0.1:{port}")
    deadline = time.monotonic() + 120
    try:
        while True:
            try:
                open_client(settings)
                break
            except CheckFailed:
                if server.poll() is not None or time.monotonic() > deadline:
                    pytest.fail((tmp_path / "log").read_text())
                time.sleep(0.5)
        yield settings
    finally:
        server.terminate()
        server.wait(timeout=30)


@pytest.mark.slow
def test_a_mlflow_server_works_as_the_embedded_store_does(server_settings: Settings, policy: Path) -> None:
    with Tracker(server_settings).run("billing", "r", {"a": 1}, {}) as tracked:
        tracked.metrics({"loss": 0.5}, 1)
        registry = Registry(server_settings)
        made = registry.register("billing", policy, key="k1", tags={}, run_id=tracked.run_id)
    assert open_client(server_settings).get_run(tracked.run_id).data.metrics == {"loss": 0.5}
    again = registry.register("billing", policy, key="k1", tags={})
    second = registry.register("billing", policy, key="k2", tags={})
    assert (made.version, again.version, second.version) == (1, 1, 2)
    registry.set_stage("billing", 1, "staging")
    registry.set_stage("billing", 1, "production")
    registry.set_stage("billing", 2, "production")
    assert stages(registry) == {1: "archived", 2: "production"}
    with pytest.raises(VersionNotFound):
        registry.resolve("billing", "staging")
    folder = registry.download(registry.resolve("billing", "production"))
    assert folder.is_relative_to(server_settings.root / "downloads")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "sub"]
    assert (folder / "sub" / "model.safetensors").read_text() == "weights"
    (folder / "config.json").write_text("{}")
    with pytest.raises(CheckFailed, match="hash differs"):
        registry.download(registry.resolve("billing", "production"))
