"""Rows made by a function of the domain folder: ``python://file.py:function``. The only source that runs code."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from infra.errors import UsageError
from infra.hashing import content_hash
from infra.yaml_file import did_you_mean

FIX = "write python://file.py:function, with a file in the domain folder"


def call_function(reference: str, base: Path, variables: Mapping[str, str]) -> list[dict[str, Any]]:
    """The rows that ``function(variables)`` gives.

    Raises:
        UsageError: the reference is malformed, leaves ``base`` (links followed) or names nothing, the function fails,
            or it gives something else than dicts with text keys.
    """
    path, name = _locate(reference, base)
    where = f"{path}:{name}"
    function = _function(path, name)
    try:
        rows = list(function(dict(variables)))
    except (Exception, SystemExit) as error:
        what = f"{name}() raised {type(error).__name__}: {error}"
        raise UsageError(what, where=_place(error, path), fix="repair it") from error
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict) or not all(isinstance(key, str) for key in row):
            what = f"row {number} from {name}() is no dict with column names: {row!r:.80}"
            raise UsageError(what, where=where, fix="yield one dict per row")
    return rows


def _locate(reference: str, base: Path) -> tuple[Path, str]:
    file, colon, name = reference.rpartition(":")
    if not colon or not name.isidentifier() or not file.endswith(".py"):
        raise UsageError(f"cannot read the location python://{reference}", where=str(base), fix=FIX)
    root = base.resolve()
    path = (root / file).resolve()
    if not path.is_relative_to(root):
        raise UsageError(f"{file} lies outside the domain folder and is not run", where=str(path), fix=FIX)
    if not path.is_file():
        near = did_you_mean(path.name, [p.name for p in root.glob("*.py")])
        raise UsageError(f"{file} does not exist{near}", where=str(path), fix=FIX)
    return path, name


def _function(path: Path, name: str) -> Callable[[dict[str, str]], Any]:
    module_name = f"senmon_source_{path.stem}_{content_hash(str(path))[:12]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path.name} cannot be loaded", where=str(path), fix=FIX)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickling look their module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        what = f"{path.name} fails on import: {type(error).__name__}: {error}"
        raise UsageError(what, where=_place(error, path), fix="repair it") from error
    function = vars(module).get(name)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UsageError(
            f"{path.name} has no function {name!r}{did_you_mean(name, functions)}", where=str(path), fix=FIX
        )
    made: Callable[[dict[str, str]], Any] = function
    return made


def _place(error: BaseException, path: Path) -> str:
    """File and line of the last step that ``path`` itself took."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}"
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}:{own[-1].lineno}" if own else str(path)
