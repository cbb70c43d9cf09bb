"""House rules a machine can check: imports go down, the command starts light, files and functions stay short."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BELOW: dict[str, set[str]] = {
    "infra": set(),
    "data_contracts": {"infra"},
    "domain_rewards": {"infra", "data_contracts"},
    "sft": {"infra", "data_contracts", "domain_rewards"},
    "rl": {"infra", "data_contracts", "domain_rewards", "sft"},
    "serving": {"infra", "data_contracts", "domain_rewards"},
    "pipelines": {"infra", "data_contracts", "domain_rewards", "sft", "rl", "serving"},
}
HEAVY = (
    "torch",
    "transformers",
    "mlflow",
    "prefect",
    "great_expectations",
    "pandas",
    "pyarrow",
    "sqlalchemy",
    "fastapi",
)
MAX_LINES = 500
MAX_FUNCTION_LINES = 80
HELP_SECONDS = 2.0
"""Generous for a busy machine; on a quiet one it is a tenth."""

SOURCES = [path for room in BELOW for path in sorted((ROOT / room).rglob("*.py"))]


def imported_rooms(source: str) -> set[str]:
    """Top-level names of all imports in a file, those inside functions included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


def long_functions(source: str) -> list[str]:
    return [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno >= MAX_FUNCTION_LINES
    ]


def test_the_checks_below_can_fail():
    assert imported_rooms("def f():\n    from rl.config import RLConfig\n    import serving.app") == {"rl", "serving"}
    assert long_functions("def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES) == ["f"]
    assert long_functions("def f():\n" + "    x = 1\n" * (MAX_FUNCTION_LINES - 1)) == []


def test_imports_only_go_down():
    wrong = []
    for path in SOURCES:
        room = path.relative_to(ROOT).parts[0]
        above = (imported_rooms(path.read_text()) & (BELOW.keys() | {"tests"})) - BELOW[room] - {room}
        wrong += [f"{path.relative_to(ROOT)} imports {name}" for name in sorted(above)]
    assert wrong == []


def test_files_and_functions_stay_short():
    wrong = []
    for path in SOURCES:
        text = path.read_text()
        if text.count("\n") > MAX_LINES:
            wrong.append(f"{path.relative_to(ROOT)}: {text.count(chr(10))} lines")
        wrong += [f"{path.relative_to(ROOT)}: {name}" for name in long_functions(text)]
    assert wrong == []


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["serve", "--help"]])
def test_help_loads_nothing_heavy_and_answers_at_once(arguments: list[str]):
    program = (
        "import json, sys\n"
        "from pipelines.cli import main\n"
        f"sys.argv = ['senmon', *{arguments!r}]\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    code = end.code\n"
        "print(json.dumps([code, sorted(name for name in sys.modules if '.' not in name)]))\n"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    seconds = time.monotonic() - began
    code, modules = json.loads(done.stdout.splitlines()[-1])
    assert not code
    assert "Usage: senmon" in done.stdout
    assert [name for name in HEAVY if name in modules] == []
    assert seconds < HELP_SECONDS


def test_reading_a_domain_loads_nothing_heavy():
    program = (
        "import json, sys\n"
        "from pipelines.spec import bundled_domains, load_domain\n"
        "names = [load_domain(name).name for name in bundled_domains()]\n"
        "print(json.dumps([names, sorted(name for name in sys.modules if '.' not in name)]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    names, modules = json.loads(done.stdout)
    assert names == ["arithmetic", "invoice_approval"]
    heavy = ("torch", "transformers", "mlflow", "prefect", "great_expectations", "pandas")
    assert [name for name in heavy if name in modules] == []
