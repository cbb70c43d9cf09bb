"""YAML with line numbers: every problem is reported with file, line, key and a fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from infra.errors import UsageError

Keys = tuple[str | int, ...]


@dataclass
class YamlFile:
    """A mapping read from a YAML 1.2 file; ``lines`` holds the line of every key, by path."""

    path: Path
    values: dict[str, Any]
    lines: dict[Keys, int]
    overridden: dict[Keys, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> YamlFile:
        """Read a file.

        Raises:
            UsageError: it cannot be read, is not YAML, repeats a key, or is not a mapping.
        """
        from ruamel.yaml import YAML
        from ruamel.yaml.error import MarkedYAMLError, YAMLError

        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"cannot read {path.name}: {error}", where=str(path), fix="make it a UTF-8 file"
            ) from error
        try:
            values = YAML(typ="safe", pure=True).load(text)
            lines: dict[Keys, int] = {}
            _collect_lines(YAML(typ="safe", pure=True).compose(text), (), lines, set())
        except RecursionError:
            raise UsageError(
                f"{path.name} is nested too deeply", where=str(path), fix="write it flatter: a few levels are enough"
            ) from None
        except YAMLError as error:
            mark = error.problem_mark if isinstance(error, MarkedYAMLError) else None
            problem = error.problem if isinstance(error, MarkedYAMLError) else str(error)
            where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
            raise UsageError(
                f"{path.name} is not valid YAML: {str(problem).strip()}",
                where=where,
                fix="look at this line and the one before it: indentation, a missing colon, quote or bracket",
            ) from None
        if not isinstance(values, dict):
            raise UsageError(f"{path.name} holds no mapping", where=f"{path}:1", fix="write `key: value` lines")
        return cls(path, values, lines)

    def where(self, keys: Sequence[str | int]) -> str:
        """File and line of a key, or of the nearest key above it; the option which overrode it."""
        for length in range(len(keys), 0, -1):
            prefix = tuple(keys[:length])
            if prefix in self.overridden:
                return f"--set {self.overridden[prefix]}"
            if prefix in self.lines:
                return f"{self.path}:{self.lines[prefix]}"
        return str(self.path)

    def override(self, option: str) -> None:
        """Apply ``key.path=value``; the value is YAML, list items are named by number.

        Raises:
            UsageError: no ``=``, a value that is not YAML, or a path through something that has no keys.
        """
        from ruamel.yaml import YAML
        from ruamel.yaml.error import YAMLError

        name, equals, text = option.partition("=")
        keys = [int(part) if part.isdecimal() else part for part in name.strip().split(".")]
        where = f"--set {option}"
        if not equals or not all(isinstance(key, int) or key for key in keys):
            raise UsageError(
                "cannot read this override", where=where, fix="write --set key.path=value, e.g. rl.steps=20"
            )
        try:
            value = YAML(typ="safe", pure=True).load(text)
        except (YAMLError, RecursionError):
            raise UsageError(
                "the value is not valid YAML", where=where, fix="quote it for YAML and for the shell"
            ) from None
        target: Any = self.values
        for index, key in enumerate(keys):
            last = index == len(keys) - 1
            if isinstance(target, dict):
                if last:
                    target[str(key)] = value
                elif target.get(str(key)) is None:
                    target[str(key)] = {}
                target = target[str(key)]
            elif isinstance(target, list) and isinstance(key, int) and key < len(target):
                if last:
                    target[key] = value
                target = target[key]
            else:
                above = ".".join(map(str, keys[:index]))
                raise UsageError(f"{above} has no key {key!r}", where=where, fix="name a key that domain.yaml can have")
        self.overridden[tuple(keys)] = option

    def explain(self, error: ValidationError, model: type[BaseModel]) -> UsageError:
        """The user's view of a validation error: every problem with its line, the first one's fix."""
        problems = error.errors(include_url=False, include_input=False)
        lines, fixes = [], []
        for problem in problems:
            keys = tuple(problem["loc"])
            name = ".".join(map(str, keys)) or "the file"
            if problem["type"] == "extra_forbidden":
                siblings = _field_names(model, keys[:-1])
                lines.append(f"unknown key {name}{did_you_mean(str(keys[-1]), siblings)}")
                fixes.append(f"known keys here: {', '.join(siblings)}" if siblings else "remove it")
            elif problem["type"] == "missing":
                lines.append(f"missing key {name}")
                fixes.append(f"add {name} to {self.path.name}")
            else:
                lines.append(f"{name}: {problem['msg'].removeprefix('Value error, ')}")
                fixes.append(f"change {name}")
        where = [self.where(tuple(problem["loc"])) for problem in problems]
        if len(problems) == 1:
            return UsageError(lines[0], where=where[0], fix=fixes[0])
        listing = "\n".join(f"    {line}  [{place}]" for line, place in zip(lines, where, strict=True))
        return UsageError(
            f"{self.path.name} has {len(problems)} problems:\n{listing}",
            where=str(self.path),
            fix="; ".join(dict.fromkeys(fixes)),
        )


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``, did you mean 'x'?`` or nothing."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f", did you mean {matches[0]!r}?" if matches else ""


def _collect_lines(node: Any, keys: Keys, lines: dict[Keys, int], seen: set[int]) -> None:
    from ruamel.yaml.nodes import MappingNode, SequenceNode

    if id(node) in seen:  # an alias: its lines are those of the anchor, and it may be a cycle
        return
    seen.add(id(node))
    if isinstance(node, MappingNode):
        for key, value in node.value:
            path = (*keys, key.value)
            lines[path] = key.start_mark.line + 1
            _collect_lines(value, path, lines, seen)
    elif isinstance(node, SequenceNode):
        for index, value in enumerate(node.value):
            path = (*keys, index)
            lines[path] = value.start_mark.line + 1
            _collect_lines(value, path, lines, seen)


def _field_names(model: type[BaseModel], keys: Sequence[str | int]) -> list[str]:
    """Names a mapping may have at ``keys`` below ``model``; empty when that is no model."""
    models = {model}
    for key in keys:
        if isinstance(key, int):
            continue
        annotations = [
            info.annotation
            for candidate in models
            for name, info in candidate.model_fields.items()
            if key in (name, info.alias)
        ]
        models = {found for annotation in annotations for found in _models_in(annotation)}
    return sorted({info.alias or name for found in models for name, info in found.model_fields.items()})


def _models_in(annotation: Any) -> set[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {annotation}
    return {found for part in get_args(annotation) for found in _models_in(part)}
