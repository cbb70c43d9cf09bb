"""Finding and loading a domain's code."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from domain_rewards import plugins
from domain_rewards.environments.base import ToolFailure
from domain_rewards.plugins import discover, resolve
from domain_rewards.runtime import load_runtime
from infra.errors import UsageError
from tests.domain_rewards.fixtures import Desk, make_task

ENVIRONMENT = """
from __future__ import annotations
from domain_rewards.environments.base import ToolEnvironment, tool
from infra.errors import UsageError
from .words import GREETING

class Hello(ToolEnvironment):
    @classmethod
    def check_options(cls, options):
        if "who" not in options:
            raise UsageError("the option who is missing")

    async def setup(self):
        if self.options["who"] == "nobody":
            raise OSError("nobody is there")

    @tool
    def greet(self) -> str:
        "Greet."
        return f"{GREETING} {self.options['who']}"
"""
VERIFIERS = """
from domain_rewards.verifiers.base import verifier

@verifier("polite")
def polite(episode):
    return 1.0

@verifier("polite")
def also_polite(episode):
    return 1.0

def undecorated(episode):
    return 1.0
"""


@pytest.fixture
def domain(tmp_path: Path) -> Path:
    (tmp_path / "environment.py").write_text(ENVIRONMENT)
    (tmp_path / "verifiers.py").write_text(VERIFIERS)
    (tmp_path / "words.py").write_text('GREETING = "hello"\n')
    return tmp_path


async def test_a_domain_folder_runs(domain: Path) -> None:
    runtime = load_runtime("environment.py:Hello", {"who": "world"}, ["verifiers.py:polite"], domain)
    environment = await runtime.open(make_task())
    assert environment.greet() == "hello world"  # type: ignore[attr-defined]
    assert [tool.name for tool in runtime.environment.tools()] == ["greet"]
    assert [each.name for each in runtime.verifiers] == ["polite"]
    assert "environment" not in sys.modules


async def test_changed_code_is_loaded_anew_and_unchanged_code_is_not(domain: Path) -> None:
    first = resolve("environment.py:Hello", domain)
    assert resolve("environment.py:Hello", domain) is first
    (domain / "words.py").write_text('GREETING = "good evening"\n')
    second = resolve("environment.py:Hello", domain)
    assert second(make_task(), {"who": "world"}).greet() == "good evening world"
    assert first(make_task(), {"who": "world"}).greet() == "hello world"


async def test_a_failing_setup_has_no_reward_en12(domain: Path) -> None:
    runtime = load_runtime("environment.py:Hello", {"who": "nobody"}, ["verifiers.py:polite"], domain)
    with pytest.raises(ToolFailure, match="nobody is there") as raised:
        await runtime.open(make_task())
    verdict = runtime.unjudged(raised.value)
    assert verdict.reward is None
    assert verdict.parts == {"polite": None}
    assert "OSError: nobody is there" in verdict.evidence["environment"]


@pytest.mark.parametrize(
    ("environment", "options", "verifiers", "message"),
    [
        ("environment.py:Hello", {}, ["verifiers.py:polite"], "the option who is missing"),
        ("verifiers.py:polite", {}, ["verifiers.py:polite"], "is not an environment class"),
        ("environment.py:Hello", {"who": "x"}, ["verifiers.py:undecorated"], "is not a verifier"),
        ("environment.py:Hello", {"who": "x"}, ["verifiers.py:polite", "verifiers.py:also_polite"], "two verifiers"),
        ("environment.py:Hello", {"who": "x"}, [], "at least one verifier"),
    ],
)
def test_unusable_domains(
    domain: Path, environment: str, options: dict[str, str], verifiers: list[str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        load_runtime(environment, options, verifiers, domain)


@pytest.mark.parametrize(
    ("reference", "message", "hint"),
    [
        ("missing.py:X", "no file missing.py", "environment.py, verifiers.py, words.py"),
        ("environment.py:Gone", "has no Gone", "Hello"),
        ("../other.py:X", "outside of the domain folder", ""),
        ("/etc/hostname.py:X", "outside of the domain folder", ""),
        ("no.such.module:x", "cannot be imported: ModuleNotFoundError", ""),
        ("json:nothing", "module json has no nothing", "dumps"),
        ("unheard_of", "no installed package offers 'unheard_of'", "file.py:Name"),
        ("environment.py:", "is not a reference", ""),
        (":Hello", "is not a reference", ""),
    ],
)
def test_errors_say_what_was_looked_for(domain: Path, reference: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        resolve(reference, domain)
    assert hint in raised.value.fix


def test_a_broken_file_is_named_with_its_line(domain: Path) -> None:
    (domain / "broken.py").write_text("import math\nmath.nothing\n")
    with pytest.raises(UsageError, match="AttributeError") as raised:
        resolve("broken.py:x", domain)
    assert raised.value.where == f"{domain / 'broken.py'}:2"
    (domain / "syntax.py").write_text("def\n")
    with pytest.raises(UsageError, match=r"SyntaxError.*syntax.py, line 1"):
        resolve("syntax.py:x", domain)


def test_a_module_that_exits_is_bad_input(domain: Path) -> None:
    (domain / "leaves.py").write_text("import sys\n\nsys.exit(5)\n")
    with pytest.raises(UsageError, match=r"leaves.py cannot be imported: SystemExit: 5"):
        resolve("leaves.py:x", domain)


def test_a_file_needs_a_folder() -> None:
    with pytest.raises(UsageError, match="no domain folder"):
        resolve("environment.py:Hello", None)


def test_modules_work_everywhere() -> None:
    assert resolve("tests.domain_rewards.fixtures:Desk", None) is Desk


def test_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    points = EntryPoints(
        [
            EntryPoint("desk", "tests.domain_rewards.fixtures:Desk", plugins.ENVIRONMENTS),
            EntryPoint("gone", "tests.domain_rewards.gone:Desk", plugins.ENVIRONMENTS),
            EntryPoint("twice", "tests.domain_rewards.fixtures:Desk", plugins.ENVIRONMENTS),
            EntryPoint("twice", "json:dumps", plugins.ENVIRONMENTS),
            EntryPoint("desk", "json:dumps", plugins.VERIFIERS),
        ]
    )
    monkeypatch.setattr(plugins, "entry_points", points.select)
    assert resolve("desk", None, plugins.ENVIRONMENTS) is Desk
    with pytest.raises(UsageError, match="taken 2 times"):
        resolve("twice", None, plugins.ENVIRONMENTS)
    with pytest.raises(UsageError, match="taken 2 times"):
        resolve("desk", None)
    with pytest.raises(UsageError, match=r"entry point gone .* cannot be loaded"):
        resolve("gone", None)
    with pytest.raises(UsageError, match="no installed package") as raised:
        resolve("other", None, plugins.ENVIRONMENTS)
    assert "desk, gone, twice" in raised.value.fix
    found = {(each.group, each.name, each.reference): each.error for each in discover()}
    assert found[plugins.ENVIRONMENTS, "desk", "tests.domain_rewards.fixtures:Desk"] is None
    assert "ModuleNotFoundError" in (found[plugins.ENVIRONMENTS, "gone", "tests.domain_rewards.gone:Desk"] or "")
    assert len(found) == 5
