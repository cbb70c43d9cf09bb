"""What a contract's logical types and formats mean in Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import date, datetime, time
from typing import Any

TEMPORAL: Mapping[str, Callable[[str], Any]] = {
    "date": date.fromisoformat,
    "timestamp": datetime.fromisoformat,
    "time": time.fromisoformat,
}
"""Types kept as ISO 8601 text, and how to read them."""

STRING_FORMATS = frozenset({"email", "ipv4", "ipv6", "uuid"})
"""String formats that are checked (by ``jsonschema``'s format checker)."""


def integer_range(name: str) -> tuple[int, int]:
    """Smallest and largest value of an ODCS integer format: ``i8`` … ``i128``, ``u8`` … ``u128``."""
    bits = int(name[1:])
    return (0, 2**bits - 1) if name.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
