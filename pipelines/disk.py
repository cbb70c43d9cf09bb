"""Recognising a full disk, whatever library ran into it, and saying so."""

from __future__ import annotations

import errno
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from infra.errors import CheckFailed, SenmonError

FULL = (errno.ENOSPC, errno.EDQUOT)
FULL_TEXTS = ("No space left on device", "disk is full", "Disk quota exceeded")
"""Of ``OSError`` without a number (shutil's lists) and of SQLite."""
RUST_TEXT = f"(os error {errno.ENOSPC})"
"""Of safetensors, whose errors are no ``OSError``."""
NEARLY_FULL_BYTES = 1 << 20
"""Less than this free explains an error that does not say what it is (torch's writer, a server that cannot write)."""
MAX_CAUSE = 200


def disk_full(error: BaseException, folder: Path, fix: str) -> CheckFailed | None:
    """What to tell the user if ``error`` comes from a full disk, else None.

    Args:
        error: it, and what it was raised from, is looked at.
        folder: where the work was writing; told where the error itself names no file.
        fix: how to go on once there is space.
    """
    chain = list(_chain(error))
    told = [each for each in chain if _says_full(each)]
    place = next(path for path in (folder, *folder.parents) if path.exists())
    if not told:
        explained = any(isinstance(each, SenmonError) for each in chain)
        if explained or shutil.disk_usage(place).free >= NEARLY_FULL_BYTES:
            return None
    named = next((each.filename for each in told if isinstance(each, OSError) and each.filename), place)
    cause = str(told[-1] if told else error).partition("\n")[0]
    return CheckFailed(f"the disk is full: {cause[:MAX_CAUSE]}", where=str(named), fix=f"free some space, then {fix}")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it came from, outermost first."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _says_full(error: BaseException) -> bool:
    text = str(error)
    if isinstance(error, OSError | sqlite3.Error):
        number = error.errno if isinstance(error, OSError) else None
        return number in FULL or any(each in text for each in FULL_TEXTS)
    return RUST_TEXT in text and not isinstance(error, SenmonError)
