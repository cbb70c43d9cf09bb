from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from infra.catalog import Catalog, Promotion
from infra.compute.attention.choice import Availability
from infra.settings import Settings
from pipelines import prefect_env
from pipelines.cli import app
from pipelines.demo import read_turn
from pipelines.runner import summarise
from tests.integration.toy_domain import write_toy_domain


@pytest.fixture
def settings(mlflow_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("SENMON_HOME", str(mlflow_settings.root))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    return mlflow_settings


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def last_line(done: Result) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return value


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "invoice_aproval", "--json"], "did you mean 'invoice_approval'"),
        (["run", "arithmetic", "--json", "--set", "rl.stepz=1"], "unknown key rl.stepz"),
        (["run", "arithmetic", "--json", "--stages", "nosuch"], "unknown stage"),
        (["run", "arithmetic", "--json", "--resume"], "no unfinished run"),
        (["serve", "arithmetic", "--json"], "no registered version"),
        (["promote", "arithmetic", "--to", "staging", "--json"], "which version"),
        (["history", "../x", "--json"], "not a valid domain name"),
    ],
)
def test_bad_input_is_exit_code_2_and_one_json_line(settings: Settings, arguments: list[str], expected: str):
    done = call(*arguments)
    assert done.exit_code == 2
    error = last_line(done)["error"]
    assert expected in error["what"]
    assert error["where"]
    assert error["fix"]
    assert f"error: {error['what']}" in done.stderr
    assert len(done.stdout.splitlines()) == 1


def test_a_folder_that_has_nothing_to_serve_is_named_as_it_was_given(settings: Settings, tmp_path: Path):
    folder = write_toy_domain(tmp_path / "toy", tasks=1)
    error = last_line(call("serve", str(folder), "--json"))["error"]
    assert f"senmon run {folder} --promote" in error["fix"]


@pytest.mark.parametrize("command", [["promote", "arithmetic"], ["rollback", "arithmetic"]])
def test_moving_what_is_not_there_is_exit_code_1(settings: Settings, command: list[str]):
    done = call(*command, "--json")
    assert done.exit_code == 1
    assert "arithmetic has no version in" in last_line(done)["error"]["what"]


def test_an_unknown_option_and_a_bad_setting_are_exit_code_2(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    assert call("run", "arithmetic", "--nosuch").exit_code == 2
    monkeypatch.setenv("SENMON_THREADS", "many")
    done = call("domains", "--json")
    assert done.exit_code == 2
    assert "SENMON_THREADS" in last_line(done)["error"]["what"]


def test_domains_and_history_tell_what_the_catalog_knows(settings: Settings):
    with Catalog.open(settings.catalog) as catalog:
        run = catalog.start_run("from_a_folder", "hash", {})
        for version, to in ((1, "staging"), (1, "production"), (2, "staging")):
            entry = Promotion(
                key=f"{version}{to}",
                domain="from_a_folder",
                version=version,
                from_stage="none",
                to_stage=to,
                who="ci",
                why="test",
            )
            catalog.append_promotion(entry)
    rows = {row["name"]: row for row in last_line(call("domains", "--json"))["domains"]}
    assert {"arithmetic", "invoice_approval", "from_a_folder"} == set(rows)
    row = rows["from_a_folder"]
    assert (row["last_run"], row["last_status"], row["staging"], row["production"]) == (run.run_id, "running", 2, 1)
    ledger = last_line(call("history", "from_a_folder", "--json"))["promotions"]
    assert [(entry["version"], entry["to_stage"]) for entry in ledger] == [
        (1, "staging"),
        (1, "production"),
        (2, "staging"),
    ]
    assert "from_a_folder" in call("domains").stdout


def test_doctor_finds_what_is_there_and_fails_on_what_a_run_needs(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    done = call("doctor", "--json")
    report = last_line(done)
    checks = {check["name"]: check for check in report["checks"]}
    assert (done.exit_code, report["healthy"]) == (0, True)
    assert checks["torch"]["state"] == checks["catalog"]["state"] == checks["mlflow"]["state"] == "ok"
    assert "invoice_approval" in " ".join(checks)

    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    monkeypatch.setenv("SENMON_CATALOG_URL", "mysql://nowhere/x")
    done = call("doctor", "--json")
    failed = {check["name"]: check for check in last_line(done)["checks"] if check["state"] == "failed"}
    assert done.exit_code == 1
    assert set(failed) == {"catalog", "prefect server"}
    assert all(check["fix"] for check in failed.values())


def test_doctor_names_the_attention_kernels(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    found = [Availability("fast", "the Python module fast is not installed"), Availability("cpu", None)]
    monkeypatch.setattr("infra.compute.attention.choice.available", lambda: found)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = call("doctor", "--json")
    checks = {check["name"]: check for check in last_line(done)["checks"] if "attention" in check["name"]}
    assert done.exit_code == 0
    assert {name: (check["state"], check["detail"]) for name, check in checks.items()} == {
        "attention": ("ok", "cpu; usable: cpu"),
        "attention: fast": ("missing", "the Python module fast is not installed"),
    }

    def broken() -> list[Availability]:
        raise ImportError("libcudart.so.12")

    monkeypatch.setattr("infra.compute.attention.choice.available", broken)
    done = call("doctor", "--json")
    failed = [check for check in last_line(done)["checks"] if check["state"] == "failed"]
    assert done.exit_code == 1
    assert [(check["name"], check["detail"]) for check in failed] == [("attention", "ImportError: libcudart.so.12")]


def test_prefect_is_set_up_below_home_and_the_users_own_settings_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    names = [name for name in os.environ if name.startswith("PREFECT_")]
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k not in names})
    assert prefect_env.configure(tmp_path) is False
    assert os.environ["PREFECT_HOME"] == str(tmp_path / "prefect")
    assert prefect_env.STARTUP_SECONDS >= 120, "a fresh home on a busy machine needs it"
    os.environ["PREFECT_HOME"] = "/mine"
    os.environ["PREFECT_API_URL"] = "http://server/api"
    assert prefect_env.configure(tmp_path) is True
    assert os.environ["PREFECT_HOME"] == "/mine"


def test_the_embedded_prefect_is_named_only_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefect_env, "server", lambda _: nullcontext("http://127.0.0.1:1/api"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with pytest.raises(KeyError), prefect_env.embedded(tmp_path):  # noqa: PT012
        assert os.environ["PREFECT_API_URL"] == "http://127.0.0.1:1/api"
        raise KeyError
    assert "PREFECT_API_URL" not in os.environ


def test_a_partial_runs_summary_has_every_key_and_no_invented_figure():
    summary = summarise("d", "r", {"snapshot": {"snapshot": "abc"}}, 1.234)
    assert summary["snapshot"] == "abc"
    assert summary["seconds"] == 1.2
    assert [key for key, value in summary.items() if value is None] == [
        "sft.heldout_success",
        "rl.heldout_success",
        "rl.heldout_success_sampled",
        "thinking_token_ratio",
        "kl_to_reference",
        "registry.version",
        "registry.stage",
    ]


def test_a_reply_without_figures_has_unknown_ones():
    call = {"id": "c1", "function": {"name": "double", "arguments": '{"number":2}'}}
    message = {"content": None, "reasoning": "hm", "tool_calls": [call]}
    turn = read_turn({"choices": [{"message": message}]})
    assert (turn.thinking_token_ratio, turn.latency_ms) == (None, None)
    assert turn.message.thinking == "hm"
    assert [(c.call_id, c.name, c.arguments) for c in turn.message.tool_calls] == [("c1", "double", '{"number":2}')]
    timed = read_turn(
        {"choices": [{"message": {"content": "4"}}], "metrics": {"thinking_token_ratio": 0.5, "e2e_latency_ms": 3.0}}
    )
    assert (timed.thinking_token_ratio, timed.latency_ms, timed.message.content) == (0.5, 3.0, "4")


def test_tables_show_brackets_as_they_are() -> None:
    import io

    from rich.console import Console

    from pipelines.output import table

    stream = io.StringIO()
    table(Console(file=stream, width=80), ["fix"], [["pip install 'senmon[ray]'"], [None], [0.123456]])
    assert "senmon[ray]" in stream.getvalue()
    assert "–" in stream.getvalue()
    assert "0.1235" in stream.getvalue()


@pytest.mark.parametrize(
    "arguments",
    [["run"], ["run", "x", "--nonsense"], ["run", "x", "--seed", "-1"], ["nonsense"], ["serve", "--port", "x"]],
)
def test_wrong_usage_with_json_is_one_json_line_and_exit_code_2(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pipelines.cli import main

    monkeypatch.setattr("sys.argv", ["senmon", *arguments, "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    out = capsys.readouterr().out.splitlines()
    assert json.loads(out[-1])["exit_code"] == 2
    assert json.loads(out[-1])["error"]["what"]


def test_infinite_settings_and_missing_models_are_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from pipelines.cli import main

    monkeypatch.setenv("SENMON_HOME", str(tmp_path))
    for option, told in (
        ("sft.learning_rate=.inf", "finite number"),
        ("model={path: /no/such/model}", "no model in /no/such/model"),
    ):
        monkeypatch.setattr("sys.argv", ["senmon", "run", "arithmetic", "--json", "--set", option])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert told in capsys.readouterr().out


def test_an_unexpected_error_is_one_json_line_with_its_traceback_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    import typer

    from pipelines.output import command

    def fail() -> None:
        with command(as_json=True):
            raise OSError("disk full\nsecond line")

    with pytest.raises(typer.Exit) as ended:
        fail()
    assert ended.value.exit_code == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out.splitlines()[-1])["error"]["what"] == "OSError: disk full"
    assert "Traceback" in printed.err
