"""Checkpoints that appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from infra.errors import CheckFailed


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write tensors and plain values to ``path``: to a partial file first, flushed, then renamed."""
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(path.suffix + ".partial")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """Read a checkpoint, or None when there is none; no code in it is executed (``weights_only``).

    Raises:
        CheckFailed: the file is damaged.
    """
    import torch

    if not path.is_file():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, ValueError, OSError) as error:
        raise CheckFailed(
            f"the checkpoint is damaged: {str(error).splitlines()[0]}",
            where=str(path),
            fix="delete this file: the stage then starts from its beginning",
        ) from error
    return state
