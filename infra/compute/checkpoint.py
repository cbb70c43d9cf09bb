"""Checkpoints that appear whole or not at all."""

from __future__ import annotations

import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from infra.errors import CheckFailed
from infra.hashing import file_hash
from infra.records import Record
from infra.telemetry import logger

MANIFEST = "manifest.json"
STATE = "state.pt"
PARTIAL = ".partial"
REPLACED = ".replaced"
"""Suffix of a sound checkpoint while a new one of the same step takes its place."""
_NAME = re.compile(rf"step-(\d{{8,}})({re.escape(REPLACED)})?")
Part = TypeVar("Part")
_UNREADABLE = (RuntimeError, EOFError, ValueError, OSError, pickle.UnpicklingError)


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write tensors and plain values to ``path``: to a partial file first, flushed, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(path.suffix + PARTIAL)
    write_state(partial, state)
    partial.replace(path)


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """Read a checkpoint, or None when there is none; no code in it is executed (``weights_only``).

    Raises:
        CheckFailed: the file is damaged.
    """
    if not path.is_file():
        return None
    try:
        return read_state(path)
    except _UNREADABLE as error:
        raise CheckFailed(
            f"the checkpoint is damaged: {_first_line(error)}",
            where=str(path),
            fix="delete this file: the stage then starts from its beginning",
        ) from error


class StoredFile(Record):
    """Size and content of one file of a checkpoint."""

    bytes: int
    sha256: str


class _Manifest(Record):
    """Written last: what a whole checkpoint consists of."""

    step: int
    best: bool
    files: dict[str, StoredFile]


def stored_file(path: Path) -> StoredFile:
    """Size and content of a file that is there."""
    return StoredFile(bytes=path.stat().st_size, sha256=file_hash(path))


def not_written(step: int, why: str, where: Path) -> CheckFailed:
    """The error of a save that failed; the older checkpoints are intact."""
    return CheckFailed(
        f"the checkpoint of step {step} could not be written: {why}",
        where=str(where),
        fix="free disk space or move the run's folder, then resume; the older checkpoints are intact",
    )


class _UnusableError(Exception):
    """Why a checkpoint cannot be used."""


class CheckpointStore:
    """The checkpoints of one run: ``folder/step-00000900/`` with ``state.pt`` and ``manifest.json``.

    One process writes to a folder at a time. Step numbers alone say which checkpoint is newer.

    Args:
        folder: made by the first save.
        keep: how many checkpoints stay, the best one included; the newest and the best always stay.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError("keep must be at least 1")
        self.folder, self.keep = folder, keep
        self._damaged: set[int] = set()

    def save(self, step: int, state: dict[str, Any], best: bool = False) -> Path:
        """Write tensors and plain values, then remove what ``keep`` no longer covers; returns the directory.

        Args:
            best: this is the best checkpoint so far; it is kept until a later one is.

        Raises:
            CheckFailed: it could not be written (disk full, no permission). Older checkpoints are untouched and
                nothing of the new one is left.
        """
        final = self._final(step)
        try:
            write_state(self.begin(step) / STATE, state)
            self.finish(step, best)
        except BaseException as error:
            self.abandon(step)
            if isinstance(error, OSError):
                raise not_written(step, error.strerror or str(error), final) from error
            raise
        return final

    def begin(self, step: int) -> Path:
        """Make the partial directory of a new checkpoint, whose files the caller writes before :meth:`finish`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        partial = self._partial(step)
        partial.mkdir()
        return partial

    def finish(self, step: int, best: bool = False, files: dict[str, StoredFile] | None = None) -> None:
        """Publish what was written since :meth:`begin`, then remove what ``keep`` no longer covers.

        Args:
            best: as in :meth:`save`.
            files: what the directory holds, where the caller has hashed it already (:func:`stored_file`).
        """
        partial = self._partial(step)
        if files is None:
            files = {path.name: stored_file(path) for path in sorted(partial.iterdir())}
        with (partial / MANIFEST).open("w") as file:
            file.write(_Manifest(step=step, best=best, files=files).model_dump_json(indent=1) + "\n")
            _flush(file)
        _sync_folder(partial)
        self._publish(partial, self._final(step), step)
        self._rotate(step)

    def abandon(self, step: int) -> None:
        """Remove what was written since :meth:`begin`."""
        shutil.rmtree(self._partial(step), ignore_errors=True)

    def newest(self) -> tuple[int, dict[str, Any]] | None:
        """Step and state of the newest sound checkpoint, tensors on the CPU; None when nothing was ever saved.

        Incomplete and damaged ones are skipped, with a log line each, and stay on disk.

        Raises:
            CheckFailed: there are checkpoints, but none is sound.
        """
        return self.newest_with(lambda path: read_state(path / STATE))

    def newest_with(self, read: Callable[[Path], Part]) -> tuple[int, Part] | None:
        """Like :meth:`newest`, with another way of reading a directory whose files are all as they were written."""
        for path in self.folder.glob(f"step-*{PARTIAL}"):
            logger.warning("checkpoint %s is skipped: incomplete, its save did not finish", path)
        problems = []
        for step, path in self._directories():
            try:
                return step, _load(path, step, read)
            except _UnusableError as problem:
                logger.warning("checkpoint %s is skipped: %s", path, problem)
                problems.append(f"{path.name} is {problem}")
                self._damaged.add(step)
        if not problems:
            return None
        raise CheckFailed(
            f"no checkpoint can be used: {'; '.join(problems)}",
            where=str(self.folder),
            fix="restore one from a backup, or delete this folder: the stage then starts from its beginning",
        )

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending; sizes are checked, contents are not."""
        return sorted(self._manifests())

    def _final(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _partial(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}{PARTIAL}"

    def _directories(self) -> list[tuple[int, Path]]:
        """Every checkpoint directory, sound or not, the newest step first; a replaced one after its successor."""
        found = []
        for path in self.folder.glob("step-*"):
            match = _NAME.fullmatch(path.name)
            if match:
                found.append((int(match[1]), match[2] is None, path))
        return [(step, path) for step, _, path in sorted(found, reverse=True)]

    def _manifests(self) -> dict[int, _Manifest]:
        complete: dict[int, _Manifest] = {}
        for step, path in self._directories():
            try:
                complete.setdefault(step, _manifest(path, step))
            except _UnusableError:
                continue
        return complete

    def _publish(self, partial: Path, final: Path, step: int) -> None:
        """Rename into place; a crash in between leaves the old checkpoint of this step under its second name."""
        aside = final.with_name(final.name + REPLACED)
        if final.exists():
            if step in self._damaged or step not in self._manifests():
                logger.warning("checkpoint %s was damaged and is replaced", final)
            final.rename(aside)
        partial.rename(final)
        _sync_folder(self.folder)
        self._damaged.discard(step)
        shutil.rmtree(aside, ignore_errors=True)

    def _rotate(self, saved: int) -> None:
        """Remove the oldest beyond ``keep``; damaged ones neither count nor are removed."""
        complete = {step: found for step, found in self._manifests().items() if step not in self._damaged}
        best = [step for step, manifest in complete.items() if manifest.best]
        wanted = {saved, max(complete), max(best, default=saved)}
        others = sorted(complete.keys() - wanted, reverse=True)
        surplus = others[max(0, self.keep - len(wanted)) :]
        for step, path in self._directories():
            if step in surplus:
                # Renamed first: a removal that dies half-way must not look like a damaged checkpoint.
                shutil.rmtree(path.rename(path.with_name(path.name + PARTIAL)))

    def _remove_leftovers(self) -> None:
        """What dead saves and removals left behind."""
        for path in self.folder.glob(f"step-*{PARTIAL}"):
            logger.info("removing %s: its save did not finish", path)
            shutil.rmtree(path)
        for path in self.folder.glob(f"step-*{REPLACED}"):
            if path.with_name(path.name.removesuffix(REPLACED)).exists():
                shutil.rmtree(path)


def _manifest(path: Path, step: int) -> _Manifest:
    """The manifest of a checkpoint whose files are all there and have the right size.

    Raises:
        _UnusableError: otherwise.
    """
    try:
        manifest = _Manifest.model_validate_json((path / MANIFEST).read_bytes())
    except FileNotFoundError as error:
        raise _UnusableError(f"incomplete: it has no {MANIFEST}") from error
    except (OSError, ValueError) as error:
        raise _UnusableError(f"damaged: {MANIFEST} cannot be read ({_first_line(error)})") from error
    if manifest.step != step:
        raise _UnusableError(f"damaged: {MANIFEST} speaks of step {manifest.step}")
    for name, expected in manifest.files.items():
        file = path / name
        size = file.stat().st_size if file.is_file() else None
        if size != expected.bytes:
            found = "missing" if size is None else f"{size} bytes"
            raise _UnusableError(f"damaged: {name} is {found}, {expected.bytes} bytes were written")
    return manifest


def _load(path: Path, step: int, read: Callable[[Path], Part]) -> Part:
    """What a checkpoint holds.

    Raises:
        _UnusableError: it is incomplete or damaged.
    """
    for name, expected in _manifest(path, step).files.items():
        if file_hash(path / name) != expected.sha256:
            raise _UnusableError(f"damaged: the content of {name} has changed since it was written")
    try:
        return read(path)
    except _UNREADABLE as error:
        raise _UnusableError(f"unreadable: {_first_line(error)}") from error


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write tensors and plain values, flushed to the disk."""
    import torch

    with path.open("wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # torch hides a full disk behind its own complaint
                raise error.__context__ from None
            raise
        _flush(file)


def read_state(path: Path) -> dict[str, Any]:
    """Read what :func:`write_state` wrote; no code in it is executed (``weights_only``)."""
    import torch

    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Flush a directory's entries, so that a rename outlives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
