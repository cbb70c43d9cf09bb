"""The catalog on SQLite and PostgreSQL: content hashes, whole stages, an append-only ledger, concurrent upgrades."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from infra.catalog import Catalog, Promotion
from infra.catalog.engine import connect, parse_url
from infra.catalog.tables import METADATA
from infra.errors import CheckFailed, UsageError
from infra.hashing import content_hash
from infra.records import Record


class Fruit(Record):
    name: str
    weight: float


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgres_url"))
    return f"sqlite:///{tmp_path}/deep/er/catalog.db"


@pytest.fixture
def catalog(url: str) -> Iterator[Catalog]:
    with Catalog.open(url) as opened:
        yield opened


def promotion(key: str = "k1", **change: object) -> Promotion:
    values = {
        "key": key,
        "domain": "billing",
        "version": 3,
        "from_stage": "none",
        "to_stage": "staging",
        "who": "flow",
        "why": "gate passed",
        "gate": {"success": 0.91},
    }
    return Promotion.model_validate(values | change)


def execute(url: str, statement: str) -> None:
    engine = connect(parse_url(url))
    try:
        with engine.begin() as connection:
            connection.exec_driver_sql(statement)
    finally:
        engine.dispose()


def test_a_record_is_stored_once_and_comes_back_equal(catalog: Catalog) -> None:
    plum = Fruit(name="plum 梅", weight=0.1)
    assert catalog.put(plum) == catalog.put(plum) == plum.id
    assert catalog.get(Fruit, plum.id) == plum
    assert [row.content for row in catalog.list("Fruit")] == [{"name": "plum 梅", "weight": 0.1}]
    assert catalog.list("Vegetable") == []


def test_kinds_do_not_mix(catalog: Catalog) -> None:
    plum = Fruit(name="plum", weight=0.1)
    catalog.put(plum, kind="Snack")
    with pytest.raises(UsageError, match="no such Fruit"):
        catalog.get(Fruit, plum.id)
    assert catalog.get(Fruit, plum.id, kind="Snack") == plum


def test_an_altered_record_is_found_out(catalog: Catalog, url: str) -> None:
    plum = Fruit(name="plum", weight=0.1)
    catalog.put(plum)
    execute(url, "UPDATE records SET payload = replace(payload, '0.1', '0.2')")
    with pytest.raises(CheckFailed, match="altered"):
        catalog.get(Fruit, plum.id)


def test_nan_is_never_stored(catalog: Catalog) -> None:
    run = catalog.start_run("billing", "s", {})
    with pytest.raises(CheckFailed, match="JSON"):
        catalog.put(Fruit(name="ghost", weight=float("nan")))
    with pytest.raises(CheckFailed, match="JSON"):
        catalog.save_stage(run.run_id, "rl", "h", {"success": float("inf")})
    with pytest.raises(CheckFailed, match="JSON"):
        catalog.finish_run(run.run_id, "succeeded", {"success": float("nan")})
    with pytest.raises(CheckFailed, match="JSON"):
        catalog.append_promotion(promotion(gate={"success": float("nan")}))
    assert catalog.stage_result(run.run_id, "rl") is None
    assert catalog.run(run.run_id).status == "running"
    assert catalog.promotions() == []


def test_run_ids_are_unique_and_runs_stay_in_order(catalog: Catalog) -> None:
    made = [catalog.start_run("billing", "s", {"seed": i}).run_id for i in range(20)]
    assert len(set(made)) == 20
    assert [run.run_id for run in catalog.runs("billing")] == made
    assert [run_id[:18] for run_id in made] == sorted(run_id[:18] for run_id in made)
    assert all(len(run_id) <= 24 for run_id in made)


def test_only_the_newest_run_can_be_resumed(catalog: Catalog) -> None:
    assert catalog.latest_unfinished("billing") is None
    first = catalog.start_run("billing", "s", {"a": [1, {"b": None}]})
    assert catalog.latest_unfinished("billing") == first
    assert catalog.finish_run(first.run_id, "failed", {"error": "tool"}).unfinished
    assert catalog.latest_unfinished("billing") == catalog.run(first.run_id)
    assert catalog.reopen_run(first.run_id).status == "running"
    second = catalog.start_run("billing", "s", {})
    catalog.start_run("support", "s", {})
    catalog.finish_run(second.run_id, "succeeded", {"registry": {"version": 1}})
    assert catalog.latest_unfinished("billing") is None
    assert catalog.run(second.run_id).summary == {"registry": {"version": 1}}


def test_a_final_status_is_never_rewritten(catalog: Catalog) -> None:
    run = catalog.start_run("billing", "s", {})
    done = catalog.finish_run(run.run_id, "succeeded", {"n": 1})
    assert catalog.finish_run(run.run_id, "succeeded", {"n": 1}) == done
    for status, summary in (("failed", {"n": 1}), ("succeeded", {"n": 2})):
        with pytest.raises(CheckFailed, match="ended already"):
            catalog.finish_run(run.run_id, status, summary)  # type: ignore[arg-type]
    with pytest.raises(CheckFailed, match="ended already"):
        catalog.reopen_run(run.run_id)
    assert catalog.run(run.run_id) == done


def test_unknown_runs_are_bad_input(catalog: Catalog) -> None:
    with pytest.raises(UsageError, match="no such run"):
        catalog.run("nope")
    with pytest.raises(UsageError, match="no such run"):
        catalog.finish_run("nope", "failed", {})
    with pytest.raises(UsageError, match="no such run"):
        catalog.save_stage("nope", "sft", "h", {})
    with pytest.raises(UsageError, match="domain name"):
        catalog.start_run("../etc", "s", {})


def test_a_stage_keeps_its_latest_result(catalog: Catalog) -> None:
    run = catalog.start_run("billing", "s", {})
    assert catalog.stage_result(run.run_id, "sft") is None
    catalog.save_stage(run.run_id, "sft", "h1", {"policy": "a"}, seconds=1.5)
    latest = catalog.save_stage(run.run_id, "sft", "h2", {"policy": "b", "loss": 0.25})
    catalog.save_stage(run.run_id, "rl", "h3", {})
    assert catalog.stage_result(run.run_id, "sft") == latest
    assert latest.inputs_hash == "h2"
    assert latest.seconds is None
    assert [row.stage for row in catalog.stages(run.run_id)] == ["sft", "rl"]


WRITER = """
import sys
from infra.catalog import Catalog
from infra.hashing import content_hash
url, run_id = sys.argv[1:]
catalog = Catalog.open(url)
for i in range(10_000):
    text = chr(97 + i % 26) * 2_000_000
    catalog.save_stage(run_id, f"s{i % 3}", content_hash(text), {"text": text})
    if not i:
        print("saved", flush=True)
"""


def test_a_killed_writer_leaves_whole_stages_only(catalog: Catalog, url: str) -> None:
    run = catalog.start_run("billing", "s", {})
    seen = 0
    for delay in (0.05, 0.11, 0.17, 0.23):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, url, run.run_id], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"saved\n"
        time.sleep(delay)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        for row in catalog.stages(run.run_id):
            seen += 1
            assert content_hash(row.output["text"]) == row.inputs_hash
            assert len(row.output["text"]) == 2_000_000
    assert seen > 0


def test_the_ledger_appends_once_per_key(catalog: Catalog) -> None:
    first = catalog.append_promotion(promotion())
    assert catalog.append_promotion(promotion()) == first
    catalog.append_promotion(promotion("k2", from_stage="staging", to_stage="production"))
    catalog.append_promotion(promotion("k3", domain="support"))
    assert [entry.key for entry in catalog.promotions("billing")] == ["k1", "k2"]
    assert [entry.key for entry in catalog.promotions()] == ["k1", "k2", "k3"]
    assert catalog.promotions("billing")[0] == first
    with pytest.raises(CheckFailed, match="another entry"):
        catalog.append_promotion(promotion(version=4))


def test_ten_concurrent_appends_of_one_key_are_one_entry(catalog: Catalog) -> None:
    with ThreadPoolExecutor(10) as pool:
        entries = list(pool.map(lambda _: catalog.append_promotion(promotion()), range(10)))
    assert len(catalog.promotions()) == 1
    assert {entry.created_at for entry in entries} == {catalog.promotions()[0].created_at}


REPLACE = (
    "INSERT OR REPLACE INTO promotions"
    " SELECT {}, domain, 9, from_stage, to_stage, who, why, gate, created_at FROM promotions"
)
EDITS = {
    "sqlite": [
        "UPDATE promotions SET version = 9",
        "DELETE FROM promotions",
        REPLACE.format("seq, 'k9'"),
        REPLACE.format("99, key"),
    ],
    "postgresql": [
        "UPDATE promotions SET version = 9",
        "DELETE FROM promotions",
        "TRUNCATE promotions",
        "INSERT INTO promotions SELECT * FROM promotions ON CONFLICT (seq) DO UPDATE SET version = 9",
    ],
}


def test_the_database_itself_refuses_to_change_the_ledger(catalog: Catalog, url: str) -> None:
    catalog.append_promotion(promotion())
    before = catalog.promotions()
    for statement in EDITS[parse_url(url).get_backend_name()]:
        with pytest.raises(sa.exc.DBAPIError, match="append-only"):
            execute(url, statement)
        assert catalog.promotions() == before


def test_the_migrations_build_the_tables_the_code_expects(catalog: Catalog, url: str) -> None:
    engine = connect(parse_url(url))
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []
    engine.dispose()


OPENER = """
import sys, time
from infra.catalog import Catalog
import alembic.command, alembic.script
print("ready", flush=True)
sys.stdin.readline()
with Catalog.open(sys.argv[1]) as catalog:
    print(catalog.start_run("billing", "s", {}).run_id)
"""


def test_processes_that_open_a_fresh_catalog_at_once_all_succeed(url: str) -> None:
    command = [sys.executable, "-c", OPENER, url]
    pipe = subprocess.PIPE
    openers = [subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) for _ in range(4)]
    for opener in openers:
        assert opener.stdout is not None
        assert opener.stdout.readline() == "ready\n"
    for opener in openers:
        assert opener.stdin is not None
        opener.stdin.write("go\n")
        opener.stdin.flush()
    results = [opener.communicate(timeout=60) for opener in openers]
    assert [opener.returncode for opener in openers] == [0, 0, 0, 0], results
    assert [error for _, error in results] == ["", "", "", ""]
    with Catalog.open(url) as catalog:
        assert {run.run_id for run in catalog.runs()} == {out.strip() for out, _ in results}


def test_threads_write_side_by_side(catalog: Catalog) -> None:
    def work(number: int) -> None:
        run = catalog.start_run("billing", "s", {"n": number})
        for stage in ("data", "sft", "rl"):
            catalog.save_stage(run.run_id, stage, "h", {"n": number})
        catalog.finish_run(run.run_id, "succeeded", {"n": number})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(24)))
    runs = catalog.runs()
    assert sorted(run.summary["n"] for run in runs) == list(range(24))
    assert all(run.summary == run.params for run in runs)


def test_a_catalog_from_the_future_is_refused(catalog: Catalog, url: str) -> None:
    execute(url, "UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(CheckFailed, match="9999") as caught:
        Catalog.open(url)
    assert "upgrade senmon" in caught.value.fix


def test_a_database_that_is_away_is_reported_without_the_password() -> None:
    with pytest.raises(CheckFailed) as caught:
        Catalog.open("postgresql+psycopg://someone:hunter2@127.0.0.1:9/nothing")
    assert "does not answer" in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("bad", ["nonsense", "mysql://host/db", "sqlite://", "sqlite:///:memory:"])
def test_bad_urls_are_bad_input(bad: str) -> None:
    with pytest.raises(UsageError) as caught:
        Catalog.open(bad)
    assert "SENMON_CATALOG_URL" in caught.value.fix


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckFailed, match="does not answer"):
        Catalog.open(f"sqlite:///{tmp_path}/file/catalog.db")


CRASHER = """
import os, signal, sys
from alembic.operations.ops import CreateTableOp
from infra.catalog import Catalog
original = CreateTableOp.create_table.__func__
def crash(cls, operations, name, *columns, **options):
    if name == "stages":
        os.kill(os.getpid(), signal.SIGKILL)
    return original(cls, operations, name, *columns, **options)
CreateTableOp.create_table = classmethod(crash)
Catalog.open(sys.argv[1])
"""


def test_an_interrupted_upgrade_leaves_no_half_schema(url: str) -> None:
    killed = subprocess.run([sys.executable, "-c", CRASHER, url], check=False, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    engine = connect(parse_url(url))
    assert sa.inspect(engine).get_table_names() == []
    engine.dispose()
    with Catalog.open(url) as catalog:
        assert catalog.runs() == []
