"""Integer arithmetic for tools: a small parser with a whitelist of characters, so that model text never runs."""

from __future__ import annotations

from domain_rewards.environments.base import ToolError

MAX_LENGTH = 64
MAX_DEPTH = 8
MAX_VALUE = 10**12


def calculate(expression: str) -> int:
    """Value of an expression of integers, ``+ - *`` and parentheses; spaces are ignored.

    Raises:
        ToolError: ``too_long`` (more than 64 characters), ``too_large`` (an intermediate value beyond ±10^12) or
            ``invalid_expression``.
    """
    if len(expression) > MAX_LENGTH:
        raise ToolError("too_long")
    parser = _Parser(expression)
    value = parser.sum(0)
    parser.end()
    return value


class _Parser:
    """sum = product (± product)*, product = factor (* factor)*, factor = -factor | (sum) | number."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def sum(self, depth: int) -> int:
        value = self._product(depth)
        while sign := self._take("+-"):
            term = self._product(depth)
            value = _bounded(value + term if sign == "+" else value - term)
        return value

    def end(self) -> None:
        self._skip()
        if self._at < len(self._text):
            raise ToolError("invalid_expression")

    def _product(self, depth: int) -> int:
        value = self._factor(depth)
        while self._take("*"):
            value = _bounded(value * self._factor(depth))
        return value

    def _factor(self, depth: int) -> int:
        if depth > MAX_DEPTH:
            raise ToolError("invalid_expression")
        if self._take("-"):
            return -self._factor(depth + 1)
        if self._take("("):
            value = self.sum(depth + 1)
            if not self._take(")"):
                raise ToolError("invalid_expression")
            return value
        self._skip()
        start = self._at
        while self._at < len(self._text) and self._text[self._at] in "0123456789":
            self._at += 1
        if start == self._at:
            raise ToolError("invalid_expression")
        return _bounded(int(self._text[start : self._at]))

    def _take(self, characters: str) -> str:
        self._skip()
        if self._at < len(self._text) and self._text[self._at] in characters:
            self._at += 1
            return self._text[self._at - 1]
        return ""

    def _skip(self) -> None:
        while self._at < len(self._text) and self._text[self._at] == " ":
            self._at += 1


def _bounded(value: int) -> int:
    if abs(value) > MAX_VALUE:
        raise ToolError("too_large")
    return value
