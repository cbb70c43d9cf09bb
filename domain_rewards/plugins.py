"""Finding environments and verifiers: by file in a domain's folder, by module, or by entry point."""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import EntryPoint, entry_points
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from infra.errors import SenmonError, UsageError
from infra.hashing import content_hash, file_hash
from infra.records import Record

ENVIRONMENTS = "senmon.environments"
VERIFIERS = "senmon.verifiers"
GROUPS = (ENVIRONMENTS, VERIFIERS)


class Plugin(Record):
    """An installed entry point, and why it cannot be loaded if it cannot."""

    group: str
    name: str
    reference: str
    distribution: str
    error: str | None


def resolve(reference: str, base: Path | None, group: str | None = None) -> Any:
    """The object that a configuration names.

    Args:
        reference: ``file.py:Name`` (a file in ``base``), ``package.module:name``, or the name of an entry point.
        base: the domain's folder; None = there is none, so files cannot be named.
        group: the only entry-point group to look in; None = both.

    Raises:
        UsageError: nothing is there, or it cannot be imported; says what was looked for.
    """
    source, separator, name = reference.partition(":")
    if not separator:
        return _from_entry_point(reference, GROUPS if group is None else (group,))
    if not source or not name:
        raise UsageError(f"{reference!r} is not a reference", where=reference, fix="write file.py:Name or module:name")
    if source.endswith(".py"):
        module, place = _load_file(source, base, reference)
    else:
        module, place = _import(source, f"module {source}"), f"module {source}"
    try:
        return attrgetter(name)(module)
    except AttributeError:
        public = ", ".join(sorted(each for each in vars(module) if not each.startswith("_"))) or "nothing"
        raise UsageError(f"{place} has no {name}", where=reference, fix=f"it defines: {public[:300]}") from None


def discover() -> list[Plugin]:
    """Every installed environment and verifier, loaded once to see whether it works."""
    found = []
    for group in GROUPS:
        for point in sorted(entry_points(group=group), key=lambda each: each.name):
            error = None
            try:
                _load_entry_point(point)
            except SenmonError as failure:
                error = failure.what
            distribution = point.dist.name if point.dist else ""
            found.append(
                Plugin(group=group, name=point.name, reference=point.value, distribution=distribution, error=error)
            )
    return found


def _from_entry_point(name: str, groups: tuple[str, ...]) -> Any:
    points = {point.value: point for group in groups for point in entry_points(group=group, name=name)}
    if len(points) > 1:
        raise UsageError(
            f"the name {name!r} is taken {len(points)} times: {', '.join(sorted(points))}",
            where=f"entry points {', '.join(groups)}",
            fix="write package.module:name instead of the short name",
        )
    if not points:
        known = sorted({point.name for group in groups for point in entry_points(group=group)})
        raise UsageError(
            f"no installed package offers {name!r}",
            where=f"entry points {', '.join(groups)}",
            fix=f"write file.py:Name or package.module:name, or one of: {', '.join(known) or '(none is installed)'}",
        )
    return _load_entry_point(next(iter(points.values())))


def _load_entry_point(point: EntryPoint) -> Any:
    where = f"entry point {point.name} of {point.dist.name if point.dist else 'an unknown package'}"
    try:
        return point.load()
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"{where} cannot be loaded: {type(error).__name__}: {error}",
            where=point.value,
            fix="reinstall or repair that package",
        ) from error


def _load_file(source: str, base: Path | None, reference: str) -> tuple[ModuleType, str]:
    if base is None:
        raise UsageError(
            f"{reference} names a file, but there is no domain folder to find it in",
            where=reference,
            fix="use package.module:name",
        )
    folder = base.resolve()
    file = (folder / source).resolve()
    if not file.is_relative_to(folder):
        raise UsageError(f"{source} lies outside of the domain folder", where=str(folder), fix="move the file into it")
    if not file.is_file():
        files = ", ".join(sorted(each.name for each in folder.glob("*.py"))) if folder.is_dir() else ""
        raise UsageError(
            f"there is no file {source}", where=str(folder), fix=f"its Python files are: {files or '(none)'}"
        )
    parts = file.relative_to(folder).with_suffix("").parts
    return _import(".".join((_package(folder), *parts)), str(file)), str(file)


def _package(folder: Path) -> str:
    """A package of our own making whose search path is the folder: its files may import each other relatively.

    The name carries a hash of the folder's code, so that changed code is loaded anew and two domains never mix.
    """
    code = {each.relative_to(folder).as_posix(): file_hash(each) for each in sorted(folder.rglob("*.py"))}
    name = f"senmon_domain_{content_hash([str(folder), code])[:16]}"
    if name not in sys.modules:
        package = ModuleType(name, f"Code of the domain folder {folder}.")
        package.__path__ = [str(folder)]
        sys.modules[name] = package
        importlib.invalidate_caches()
    return name


def _import(name: str, place: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"{place} cannot be imported: {type(error).__name__}: {error}",
            where=_last_line(error, place),
            fix="repair the import, or install what it needs",
        ) from error


def _last_line(error: BaseException, place: str) -> str:
    """Deepest frame outside of the import system."""
    where = place
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file != __file__ and "importlib" not in file:
            where = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return where
