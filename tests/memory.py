"""Peak memory of this process as the kernel counts it (Linux)."""

from __future__ import annotations

import re
from pathlib import Path

FREED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Environment of a measured process: freed memory goes back to the system, so that the peak is that of live tensors."""


def resident(key: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (the most since :func:`reset_peak`) in bytes."""
    found = re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def reset_peak() -> None:
    """Let ``VmHWM`` begin again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
