"""Reading a single value as its declared logical type, or leaving it as it is: nothing is rounded, cut or guessed."""

from __future__ import annotations

import math
import re
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

from data_contracts.strict_json import parse_json

INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,38})")
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")


def text_value(text: str, logical_type: str | None) -> Any:
    """A cell of a text file. What does not read as the declared type stays text, for validation to report."""
    if logical_type == "integer" and INTEGER.fullmatch(text):
        return int(text)
    if logical_type == "number" and NUMBER.fullmatch(text):
        return int(text) if INTEGER.fullmatch(text) else _finite(text)
    if logical_type == "boolean" and text in ("true", "false"):
        return text == "true"
    return native_value(text, logical_type)


def native_value(value: Any, logical_type: str | None, *, sql: bool = False) -> Any:
    """A value of a typed source.

    Dates and times become ISO 8601 text, exact decimals numbers, JSON text the object or array it stands for. With
    ``sql``, 0 and 1 stand for false and true in a boolean column: SQLite has no other way to say it.
    """
    if isinstance(value, str):
        if logical_type in ("object", "array"):
            try:
                return parse_json(value)
            except ValueError:
                return value
        return value
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return _exact(value)
    if isinstance(value, UUID) and logical_type == "string":
        return str(value)
    if sql and logical_type == "boolean" and type(value) is int and value in (0, 1):
        return value == 1
    return value


def _finite(text: str) -> float | str:
    number = float(text)
    return number if math.isfinite(number) else text


def _exact(value: Decimal) -> int | float | Decimal:
    if value.is_finite() and value == value.to_integral_value():
        return int(value)
    number = float(value)
    return number if math.isfinite(number) and Decimal(repr(number)) == value else value
