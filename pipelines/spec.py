"""A domain's configuration: one typed record, read from ``domain.yaml``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StringConstraints, ValidationError, field_validator, model_validator

from data_contracts.config import DataConfig
from infra.compute.config import ModelConfig
from infra.errors import UsageError
from infra.hashing import content_hash, file_hash
from infra.names import DOMAIN_NAME, check_domain
from infra.records import Config
from infra.yaml_file import YamlFile, did_you_mean
from pipelines.gates import GateRule
from rl.config import EvalConfig, RLConfig
from sft.config import SFTConfig

SPEC_FILE = "domain.yaml"
TINY_RL: Mapping[str, Any] = {
    "clip": {"low": 0.03, "high": 0.04},
    "guards": {"kl": {"warn": 0.5, "stop": 2.0, "jump": 20.0}, "drift": {"warn": 1e-4, "stop": 1e-2}},
}
"""Defaults of ``rl`` for the preset ``tiny-moe``: so small a policy moves further per update than a large one, and its
engine computes in float32. A bound of 3e-4 would clip everything it learns."""
BUNDLED = Path(__file__).parent / "domains"

Reference = Annotated[str, StringConstraints(min_length=1)]
"""``file.py:Name`` in the domain's folder, ``package.module:Name``, or the name of an entry point."""


class EnvironmentConfig(Config):
    """The tools of the domain: a ``ToolEnvironment`` class and its options (``${SENMON_HOME}`` is expanded)."""

    class_: Reference = Field(alias="class")
    options: dict[str, Any] = Field(default_factory=dict)


class Gates(Config):
    """``cold_start`` guards the way into reinforcement learning, ``promotion`` the way into the registry."""

    cold_start: tuple[GateRule, ...] = Field(min_length=1)
    promotion: tuple[GateRule, ...] = Field(min_length=1)


class ServingConfig(Config):
    """How the domain is served; empty so far."""


class DomainSpec(Config):
    """The whole configuration of one domain."""

    name: str
    description: str = ""
    model: ModelConfig
    contract: str = "contract.yaml"
    prepare: Reference | None = None
    """Callable ``(home: Path) -> None`` which makes the domain's sample data once."""
    data: DataConfig
    environment: EnvironmentConfig
    verifiers: tuple[Reference, ...] = Field(min_length=1)
    sft: SFTConfig = SFTConfig()
    rl: RLConfig = RLConfig()
    evaluation: EvalConfig = EvalConfig()
    gates: Gates
    serving: ServingConfig = ServingConfig()
    schedule: str | None = None
    seed: int = Field(default=0, ge=0)

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        if DOMAIN_NAME.fullmatch(name) is None:
            raise ValueError(
                "use lower-case letters, digits, '_' and '-', starting with a letter, at most 63 characters"
            )
        return name

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_preset(cls, values: Any) -> Any:
        model = values.get("model") if isinstance(values, Mapping) else None
        if isinstance(model, Mapping) and model.get("preset") == "tiny-moe":
            return {**values, "rl": _under(values.get("rl") or {}, TINY_RL)}
        return values

    def payload(self) -> dict[str, Any]:
        """The spec as plain JSON values."""
        return self.model_dump(mode="json", by_alias=True)


def _under(values: Any, defaults: Mapping[str, Any]) -> Any:
    """``values``, with ``defaults`` where they say nothing."""
    if not isinstance(values, Mapping):
        return values
    filled = {
        name: _under(values.get(name, {}), default) if isinstance(default, Mapping) else values.get(name, default)
        for name, default in defaults.items()
    }
    return {**values, **filled}


@dataclass(frozen=True)
class Domain:
    """A domain's folder and its validated configuration; ``reference`` is what the user called it by."""

    folder: Path
    spec: DomainSpec
    reference: str
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The domain's name."""
        return self.spec.name

    @property
    def argument(self) -> str:
        """The domain as an argument of a command that the user can copy."""
        return shlex.quote(self.reference)

    @property
    def contract(self) -> Path:
        """The data contract's file."""
        return self.folder / self.spec.contract

    @cached_property
    def code(self) -> dict[str, str]:
        """sha256 of the contract and of every Python file in the folder, by relative name."""
        files = {path.relative_to(self.folder).as_posix(): path for path in sorted(self.folder.rglob("*.py"))}
        files[self.spec.contract] = self.contract
        return {name: file_hash(path) for name, path in sorted(files.items())}

    @property
    def spec_hash(self) -> str:
        """Content hash of the configuration and of the domain's own files."""
        return content_hash({"spec": self.spec.payload(), "code": self.code})


def bundled_domains() -> list[str]:
    """Names of the domains that come with the package."""
    return sorted(path.parent.name for path in BUNDLED.glob(f"*/{SPEC_FILE}"))


def find_domain(reference: str) -> Path:
    """The folder of a domain.

    Args:
        reference: a bundled name, or a folder that holds ``domain.yaml``.

    Raises:
        UsageError: neither.
    """
    if reference in bundled_domains():
        return BUNDLED / reference
    folder = Path(reference).expanduser()
    if (folder / SPEC_FILE).is_file():
        return folder.resolve()
    names = ", ".join(bundled_domains())
    if folder.is_dir():
        raise UsageError(f"no {SPEC_FILE} in {reference}", where=str(folder.resolve()), fix=f"add one, or use {names}")
    raise UsageError(
        f"unknown domain {reference!r}{did_you_mean(reference, bundled_domains())}",
        where="DOMAIN",
        fix=f"use a bundled name ({names}) or a folder that holds {SPEC_FILE}",
    )


def domain_name(reference: str) -> str:
    """The name behind a bundled name, a folder, or the name of a domain that was only ever run from a folder.

    Raises:
        UsageError: a folder without a valid ``domain.yaml``, or a name that no domain can have.
    """
    if reference in bundled_domains():
        return reference
    if (Path(reference).expanduser() / SPEC_FILE).is_file():
        return load_domain(reference).name
    return check_domain(reference)


def load_domain(reference: str, overrides: Sequence[str] = ()) -> Domain:
    """Read and validate a domain.

    Args:
        reference: bundled name or folder.
        overrides: ``key.path=value`` entries which replace values of ``domain.yaml``; values are YAML.

    Raises:
        UsageError: naming file, line, key and fix for every problem.
    """
    folder = find_domain(reference)
    file = YamlFile.read(folder / SPEC_FILE)
    for override in overrides:
        file.override(override)
    try:
        spec = DomainSpec.model_validate(file.values)
    except ValidationError as error:
        raise file.explain(error, DomainSpec) from None
    domain = Domain(folder, spec, reference, tuple(overrides))
    _check_files(domain, file)
    return domain


def changes(before: Mapping[str, Any], after: Mapping[str, Any], path: str = "") -> list[str]:
    """Dotted keys whose values differ between two payloads."""
    found: list[str] = []
    for key in sorted(before.keys() | after.keys()):
        old, new, name = before.get(key), after.get(key), f"{path}{key}"
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += changes(old, new, f"{name}.")
        elif old != new:
            found.append(name)
    return found


def _check_files(domain: Domain, file: YamlFile) -> None:
    """Every file that the spec names exists: found now, not an hour into a run."""
    spec = domain.spec
    named: list[tuple[tuple[str | int, ...], str]] = [
        (("contract",), spec.contract),
        (("environment", "class"), spec.environment.class_),
        *((("verifiers", index), reference) for index, reference in enumerate(spec.verifiers)),
    ]
    if spec.prepare is not None:
        named.append((("prepare",), spec.prepare))
    for keys, reference in named:
        name = reference.split(":", 1)[0]
        if (keys == ("contract",) or name.endswith(".py")) and not (domain.folder / name).is_file():
            raise UsageError(
                f"{'.'.join(map(str, keys))}: there is no file {name!r}",
                where=file.where(keys),
                fix=f"create {domain.folder / name} or correct the name",
            )
