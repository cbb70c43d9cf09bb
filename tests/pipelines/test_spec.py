from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from infra.errors import UsageError
from pipelines.spec import BUNDLED, bundled_domains, changes, domain_name, find_domain, load_domain

SPEC = """\
name: arithmetic
model: {preset: tiny-moe}
data:
  tasks: {table: questions, id: task_id, prompt: "{question}"}
  splits: {dev: 1, test: 1}
environment: {class: "environment.py:Arithmetic"}
contract: contract.yaml
verifiers: ["verifiers.py:score_answer"]
sft: {}
rl: {}
gates:
  cold_start:
    - {metric: sft.dev_success, min: 0.2}
  promotion:
    - {metric: rl.dev_success, min: 0.6}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A domain to break."""
    ignored = shutil.ignore_patterns("__pycache__", "domain.yaml")
    copy = Path(shutil.copytree(BUNDLED / "arithmetic", tmp_path / "copy", ignore=ignored))
    (copy / "domain.yaml").write_text(SPEC)
    return copy


def edit(folder: Path, old: str, new: str) -> int:
    """Replace text in domain.yaml; returns the line of the change."""
    file = folder / "domain.yaml"
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))
    return text[: text.index(old)].count("\n") + 1


@pytest.mark.parametrize("name", bundled_domains())
def test_bundled_domains_are_valid_and_hash_the_same_twice(name: str):
    first, second = load_domain(name), load_domain(name)
    assert first.name == name
    assert first.spec_hash == second.spec_hash
    assert load_domain(str(BUNDLED / name)).spec_hash == first.spec_hash


def test_unknown_domain_suggests_a_name_and_lists_all():
    with pytest.raises(UsageError) as caught:
        load_domain("invoice_aproval")
    assert "did you mean 'invoice_approval'" in caught.value.what
    assert "arithmetic" in caught.value.fix
    assert caught.value.exit_code == 2


def test_folder_without_domain_yaml(tmp_path: Path):
    with pytest.raises(UsageError, match=r"no domain\.yaml"):
        find_domain(str(tmp_path))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("rl: {}", "rl: {stepz: 3}", ["unknown key rl.stepz", "did you mean 'steps'"]),
        ("sft: {}", "sftt: {}", ["unknown key sftt", "did you mean 'sft'"]),
        ("rl: {}", "rl: {steps: many}", ["rl.steps", "valid integer"]),
        ("contract: contract.yaml", "contract: missing.yaml", ["contract", "no file 'missing.yaml'"]),
        ('verifiers: ["verifiers.py:score_answer"]', "verifiers: []", ["verifiers", "at least 1"]),
        ("name: arithmetic", "name: Arith Metic", ["name", "lower-case"]),
        ("{metric: rl.dev_success, min: 0.6}", "{metric: rl.dev_success}", ["gates.promotion.0", "at least one of"]),
        ("{metric: rl.dev_success, min: 0.6}", "{metric: x, min: .nan}", ["gates.promotion.0.min", "finite"]),
    ],
)
def test_errors_name_file_line_key_and_fix(folder: Path, old: str, new: str, expected: list[str]):
    line = edit(folder, old, new)
    with pytest.raises(UsageError) as caught:
        load_domain(str(folder))
    assert f"{folder / 'domain.yaml'}:{line}" in f"{caught.value.what} {caught.value.where}"
    assert all(text in caught.value.what for text in expected)
    assert caught.value.fix


def test_all_problems_are_listed_each_with_its_line(folder: Path):
    first = edit(folder, "rl: {}", "rl: {stepz: 3}")
    second = edit(folder, "sft: {}", "sft: {batch_size: 0}")
    with pytest.raises(UsageError) as caught:
        load_domain(str(folder))
    assert "2 problems" in caught.value.what
    assert f"domain.yaml:{first}]" in caught.value.what
    assert f"domain.yaml:{second}]" in caught.value.what


@pytest.mark.parametrize(
    ("text", "line"), [("name: [unclosed\nmodel: x\n", 2), ("a: 1\na: 2\n", 2), ("a: 1\n b: 2\n", 2), ("- 1\n", 1)]
)
def test_broken_yaml_names_the_line(folder: Path, text: str, line: int):
    (folder / "domain.yaml").write_text(text)
    with pytest.raises(UsageError) as caught:
        load_domain(str(folder))
    assert caught.value.where == f"{folder / 'domain.yaml'}:{line}"


def test_overrides_replace_values_and_are_hashed():
    plain = load_domain("arithmetic")
    domain = load_domain(
        "arithmetic", ["rl.steps=3", "gates.promotion.0.min=0.1", "sft.mixture={calculator: 1}", "seed=7"]
    )
    assert domain.spec.rl.steps == 3
    assert domain.spec.gates.promotion[0].min == 0.1
    assert domain.spec.sft.mixture == {"calculator": 1.0}
    assert domain.spec.seed == 7
    assert domain.spec_hash != plain.spec_hash
    keys = changes(plain.spec.payload(), domain.spec.payload())
    assert {"rl.steps", "seed", "gates.promotion"} <= set(keys)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rl.stepz=3", "did you mean 'steps'"),
        ("rl.steps", "cannot read this override"),
        ("=3", "cannot read this override"),
        ("rl.steps=[", "not valid YAML"),
        ("name.x=1", "has no key"),
        ("gates.promotion.9.min=1", "has no key"),
        ("rl.steps=0", "greater than or equal to 1"),
    ],
)
def test_bad_overrides_name_the_option(override: str, expected: str):
    with pytest.raises(UsageError) as caught:
        load_domain("arithmetic", [override])
    assert expected in caught.value.what
    assert caught.value.where == f"--set {override}"


def test_the_hash_follows_the_domains_own_code_and_not_its_comments(folder: Path):
    before = load_domain(str(folder)).spec_hash
    edit(folder, "name: arithmetic", "# a comment\nname: arithmetic")
    assert load_domain(str(folder)).spec_hash == before
    with (folder / "verifiers.py").open("a") as file:
        file.write("\n# stricter\n")
    changed = load_domain(str(folder)).spec_hash
    assert changed != before
    with (folder / "contract.yaml").open("a") as file:
        file.write("\n")
    assert load_domain(str(folder)).spec_hash not in (before, changed)


def test_domain_name_of_name_folder_and_nonsense(folder: Path):
    assert domain_name("arithmetic") == domain_name(str(folder)) == "arithmetic"
    assert domain_name("ran_from_a_folder_once") == "ran_from_a_folder_once"
    with pytest.raises(UsageError):
        domain_name("../etc")
