"""Content hashes: the identity of every record and file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def canonical_json(value: Any) -> str:
    """One byte-for-byte form per JSON value: sorted keys, no spaces, NaN refused (``ValueError``)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def content_hash(value: Any) -> str:
    """sha256 (hex) of the canonical JSON of ``value``."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def file_hash(path: Path) -> str:
    """sha256 (hex) of a file's bytes, read in 1 MiB blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def tree_hash(folder: Path) -> str:
    """sha256 over the relative names and contents of all files below ``folder``."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return content_hash({p.relative_to(folder).as_posix(): file_hash(p) for p in files})
