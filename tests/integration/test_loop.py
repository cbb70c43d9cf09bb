"""The whole loop on a toy domain: good runs, refused data, kills, Ctrl-C, and two runs at once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

from infra.locks import domain_lock
from infra.registry import Registry
from pipelines.stages import STAGES
from tests.integration.loop import ROOT, Ended, Loop, wait_for
from tests.integration.toy_domain import read_table, write_table

SUMMARY_KEYS = [
    "domain",
    "run_id",
    "snapshot",
    "sft.heldout_success",
    "rl.heldout_success",
    "rl.heldout_success_sampled",
    "thinking_token_ratio",
    "kl_to_reference",
    "registry.version",
    "registry.stage",
    "seconds",
]
SAME_IN_EVERY_RUN = [key for key in SUMMARY_KEYS if key not in ("run_id", "seconds")]


def contents(loop: Loop, run_id: str) -> dict[str, str]:
    """What each stage made, by hash."""
    with loop.catalog() as catalog:
        return {row.stage: row.output["content"] for row in catalog.stages(run_id) if "content" in row.output}


def only_run(loop: Loop) -> tuple[str, str]:
    """Id and status of the only run."""
    with loop.catalog() as catalog:
        (run,) = catalog.runs()
    return run.run_id, run.status


def same_as_uninterrupted(loop: Loop, resumed: Ended) -> None:
    """A second, uninterrupted run makes the very same data, policies and figures."""
    assert resumed.code == 0, resumed.stderr
    other = loop.run_here("--promote")
    assert other.code == 0, other.stderr
    first, second = contents(loop, resumed.result["run_id"]), contents(loop, other.result["run_id"])
    per_version = {"register", "promote"}
    assert {k: v for k, v in first.items() if k not in per_version} == {
        k: v for k, v in second.items() if k not in per_version
    }
    expected = {key: resumed.result[key] for key in SAME_IN_EVERY_RUN}
    assert {key: other.result[key] for key in SAME_IN_EVERY_RUN} == expected | {"registry.version": 2}


def test_a_run_killed_in_rl_resumes_to_the_same_policy_and_registers_once(loop: Loop):
    process = loop.start("run", str(loop.domain), "--json", "--promote")
    checkpoints = loop.home / "runs"
    wait_for(lambda: any(checkpoints.glob("*/rl/checkpoints/step-????????/manifest.json")), process)
    process.kill()
    loop.end(process)
    run_id, status = only_run(loop)
    assert status == "running"
    assert "rl" not in contents(loop, run_id)

    resumed = loop.run("--resume")
    assert list(resumed.result) == SUMMARY_KEYS
    assert resumed.result["run_id"] == run_id
    assert resumed.result["registry.stage"] == "production"
    assert resumed.result["kl_to_reference"] > 0, "the policy must have moved, or equality proves nothing"
    kept = [line for line in resumed.stderr.splitlines() if line.endswith("kept")]
    assert [line.split()[1] for line in kept] == ["validate", "snapshot", "sft", "sft_gate"]
    assert "rl: resumed at step" in resumed.stderr
    registry = Registry(loop.settings)
    assert [(v.version, v.stage) for v in registry.versions("doubling")] == [(1, "production")]
    with loop.catalog() as catalog:
        assert [(p.version, p.to_stage) for p in catalog.promotions("doubling")] == [(1, "staging"), (1, "production")]
        assert catalog.run(run_id).status == "succeeded"

    nothing = loop.run_here("--resume")
    assert nothing.code == 2
    assert "no unfinished run" in nothing.result["error"]["what"]
    same_as_uninterrupted(loop, resumed)


def test_ctrl_c_stops_cleanly_says_how_to_resume_and_a_changed_domain_is_not_resumed(loop: Loop):
    process = loop.start("run", str(loop.domain), "--json", "--set", "sft.max_steps=5000")
    wait_for(lambda: any((loop.home / "runs").glob("*/sft/checkpoint.pt")), process)
    process.send_signal(signal.SIGINT)
    ended = loop.end(process)
    assert ended.code == 130
    assert "Traceback" not in ended.stderr
    assert f"senmon run {loop.domain} --resume" in ended.stderr
    run_id, status = only_run(loop)
    assert status == "interrupted"

    changed = loop.run_here("--resume", "--set", "rl.steps=3")
    assert changed.code == 2
    assert f"changed since run {run_id}" in changed.result["error"]["what"]
    assert "rl.steps" in changed.result["error"]["what"]
    assert only_run(loop) == (run_id, "interrupted")


def test_ctrl_c_in_a_terminal_goes_to_the_whole_group_and_stops_as_cleanly(loop: Loop):
    """With the embedded Prefect server, which must not die of the same signal; while a rollout's event loop runs."""
    command = [sys.executable, "-m", "pipelines.cli", "run", str(loop.domain), "--json", "--set", "rl.steps=5000"]
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**environment, "SENMON_HOME": str(loop.home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(lambda: any((loop.home / "runs").glob("*/rl/checkpoints/step-????????/manifest.json")), process)
    os.killpg(process.pid, signal.SIGINT)
    ended = loop.end(process)
    assert ended.code == 130, ended.stderr
    assert "ConnectError" not in ended.stderr
    assert "Traceback" not in ended.stderr
    assert only_run(loop)[1] == "interrupted"


DROPS_A_SIGNAL = '''

import os
import signal
import weakref


class _Gone:
    pass


def _signal_in_a_callback() -> None:
    """Python prints and drops what a signal handler raises while a weak reference's callback runs."""
    gone = _Gone()
    kept = weakref.ref(gone, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    del gone
    assert kept() is None


_signalled = False
_judge = odd_length.function


@verifier("odd_length")
def odd_length(episode: Episode) -> float:
    global _signalled
    if not _signalled:
        _signalled = True
        _signal_in_a_callback()
    return _judge(episode)
'''


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_whose_exception_is_dropped_still_stops_the_run(loop: Loop):
    """Inside Prefect's flow, in the stage that evaluates the cold start: neither it nor any later stage is recorded."""
    with (loop.domain / "verifiers.py").open("a") as file:
        file.write(DROPS_A_SIGNAL)
    ended = loop.run_here("--promote")
    assert ended.code == 130, ended.stderr
    run_id, status = only_run(loop)
    assert status == "interrupted"
    assert list(contents(loop, run_id)) == ["validate", "snapshot", "sft"]
    assert Registry(loop.settings).domains() == []
    assert loop.run_here("--resume", "--stages", "sft_gate").code == 0


def test_code_of_a_domain_that_exits_has_failed(loop: Loop):
    with (loop.domain / "environment.py").open("a") as file:
        file.write("\n\ndef prepare(home):\n    raise SystemExit(0)\n")
    with (loop.domain / "domain.yaml").open("a") as file:
        file.write('prepare: "environment.py:prepare"\n')
    ended = loop.run_here()
    assert ended.code == 1, ended.stdout
    assert "SystemExit" in ended.result["error"]["what"]
    assert f"senmon run {loop.domain} --resume" in ended.result["error"]["fix"]
    assert only_run(loop)[1] == "failed"


def test_stages_can_be_run_in_parts(loop: Loop):
    first = loop.run_here("--stages", "..snapshot")
    assert first.code == 0, first.stderr
    assert first.result["snapshot"]
    assert first.result["registry.version"] is None
    jumped = loop.run_here("--resume", "--stages", "rl..")
    assert only_run(loop)[1] == "failed"
    assert jumped.code == 2
    assert "needs stage sft, which was not run yet" in jumped.result["error"]["what"]
    fresh = loop.run_here("--stages", "rl..")
    assert fresh.code == 2
    assert "--resume" in fresh.result["error"]["fix"]


def test_resuming_a_run_whose_chosen_stages_are_done_goes_on_to_the_end(loop: Loop):
    first = loop.run_here("--stages", "..snapshot")
    assert first.code == 0, first.stderr
    assert only_run(loop)[1] == "partial"
    rest = loop.run_here("--resume")
    assert rest.code == 0, rest.stderr
    assert rest.result["registry.version"] == 1
    assert only_run(loop)[1] == "succeeded"


def test_a_busy_domain_is_refused_at_once_and_names_the_holder(loop: Loop):
    with domain_lock(loop.settings, "doubling", run_id="the-other-run"):
        ended = loop.run_here()
    assert ended.code == 1
    assert "the-other-run" in ended.result["error"]["what"]
    with loop.catalog() as catalog:
        assert catalog.runs() == []


def test_bad_rows_stop_the_run_with_table_row_column_rule_and_value(loop: Loop):
    rows = read_table(loop.domain, "questions")
    rows[4]["number"] = 5000
    write_table(loop.domain, "questions", rows)
    ended = loop.run_here()
    assert ended.code == 1
    what = ended.result["error"]["what"]
    assert all(part in what for part in ("questions", "row 5", "number", "999", "5000"))
    _, status = only_run(loop)
    assert status == "failed"
    assert Registry(loop.settings).domains() == []

    rows[4]["number"] = 4
    write_table(loop.domain, "questions", rows)
    assert loop.run_here("--resume", "--stages", "..snapshot").code == 0, "once the data is mended the run goes on"


def test_an_empty_table_is_not_a_green_validation(loop: Loop):
    write_table(loop.domain, "questions", [])
    ended = loop.run_here()
    assert ended.code == 1
    assert "questions" in ended.result["error"]["what"]
    assert Registry(loop.settings).domains() == []


def test_a_gate_that_says_no_registers_nothing_and_lists_the_metric(loop: Loop):
    ended = loop.run_here(
        "--promote", "--set", "gates.promotion=[{metric: rl.heldout_success, min: 2}, {metric: nosuch, min: 0}]"
    )
    assert ended.code == 1
    what = ended.result["error"]["what"]
    assert "rl.heldout_success" in what
    assert "nosuch = undefined" in what
    run_id, status = only_run(loop)
    assert status == "rejected"
    assert "gate" not in contents(loop, run_id)
    assert Registry(loop.settings).domains() == []
    assert loop.run_here("--resume").code == 2, "a rejected run is final"


def test_broken_files_are_refused_before_anything_starts(loop: Loop):
    contract = loop.domain / "contract.yaml"
    text = contract.read_text()
    contract.write_text(text.replace("schema:", "schema: ["))
    ended = loop.run_here()
    assert ended.code == 2
    assert "contract.yaml:" in ended.result["error"]["where"]
    contract.write_text(text)
    verifiers = loop.domain / "verifiers.py"
    verifiers.write_text(verifiers.read_text() + "\nimport no_such_package\n")
    ended = loop.run_here()
    assert ended.code == 2
    assert "no_such_package" in ended.result["error"]["what"]
    assert not (loop.home / "catalog.db").exists()


def test_serving_what_is_not_there_and_on_a_busy_port(loop: Loop):
    ended = loop.senmon("serve", str(loop.domain), "--json")
    assert ended.code == 2
    assert "no registered version" in ended.result["error"]["what"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ended = loop.senmon("serve", "--port", str(taken.getsockname()[1]), "--json")
    assert ended.code == 2
    assert "already in use" in ended.result["error"]["what"]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [stage.name for stage in STAGES])
def test_killed_in_any_stage_the_run_resumes_to_the_same_result(loop: Loop, stage: str):
    names = [each.name for each in STAGES]
    before = names[names.index(stage) - 1] if stage != names[0] else None
    process = loop.start("run", str(loop.domain), "--json", "--promote")
    wait_for(lambda: loop.started_stage(stage, before), process)
    process.kill()
    loop.end(process)
    resumed = loop.run("--resume")
    assert resumed.code == 0, resumed.stderr
    assert resumed.result["registry.version"] == 1
    same_as_uninterrupted(loop, resumed)
