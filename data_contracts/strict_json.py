"""JSON from outside, read without guessing: no duplicate keys, no NaN, nothing that cannot be written back."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

MAX_DIGITS = 400
"""Longest integer accepted; Python refuses to print much longer ones."""


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is not JSON, an object repeats a key (at any depth), or a value could not be written back as
            JSON and UTF-8 (NaN, Infinity, 1e999, a lone surrogate). The message is one short line.
    """
    try:
        value = json.loads(
            text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float, parse_int=_integer
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} (column {error.colno})") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("half a surrogate pair in a string") from None
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for index, name in enumerate(names) if name in names[:index])
        raise ValueError(f"duplicate key {repeated!r}")
    return result


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number out of range: {text[:40]}")
    return value


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"integer of {len(text)} digits")
    return int(text)
