"""Reading a streamed turn of a chat model: thinking tags and tool calls, however the tokens cut them."""

from __future__ import annotations

import json
from collections.abc import Set
from typing import Any, Literal

from infra.inference.renderers.base import Delta

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
REPLACEMENT = "\ufffd"

State = Literal["content", "reasoning", "call"]


class ChatStreamParser:
    """Holds back text that may be the beginning of a marker, and characters that are not whole yet.

    A ``<think>`` counts only at the beginning of a turn; markers inside thinking are prose.
    """

    def __init__(self, tokenizer: Any, stop_ids: Set[int], starts_in_reasoning: bool) -> None:
        self._tokenizer, self._stop_ids = tokenizer, stop_ids
        self._state: State = "reasoning" if starts_in_reasoning else "content"
        self._pending: list[int] = []
        self._text = ""
        self._began = starts_in_reasoning
        self._calls = 0
        self.thought = starts_in_reasoning
        self.reasoning_tokens = 0
        self.malformed: str | None = None

    def feed(self, token: int) -> list[Delta]:
        """Pieces that became certain with this token."""
        if token in self._stop_ids:
            return []
        inside = self._state == "reasoning"
        self._pending.append(token)
        text = self._tokenizer.decode(self._pending, skip_special_tokens=False)
        if text.endswith(REPLACEMENT) and len(self._pending) < 4:
            self.reasoning_tokens += inside
            return []
        self._pending = []
        self._text += text
        deltas = self._drain(final=False)
        self.reasoning_tokens += inside and self._state == "reasoning"
        return deltas

    def finish(self) -> list[Delta]:
        """Everything that is left; an open tool call is malformed."""
        if self._pending:
            self._text += self._tokenizer.decode(self._pending, skip_special_tokens=False)
            self._pending = []
        deltas = self._drain(final=True)
        if self._state == "call":
            self.malformed = self.malformed or "the tool call is not closed"
        return deltas

    def _drain(self, final: bool) -> list[Delta]:
        deltas: list[Delta] = []
        while True:
            before = (self._state, len(self._text))
            deltas += {"content": self._content, "reasoning": self._reasoning, "call": self._call}[self._state](final)
            if (self._state, len(self._text)) == before:
                return deltas

    def _content(self, final: bool) -> list[Delta]:
        if not self._began:
            stripped = self._text.lstrip()
            if stripped.startswith(THINK):
                self._text, self._state = stripped[len(THINK) :], "reasoning"
                self._began = self.thought = True
                return []
            if THINK.startswith(stripped) and not final:
                return []
            self._began = True
        return self._until(CALL, "content", "call", final)

    def _reasoning(self, final: bool) -> list[Delta]:
        return self._until(THINK_END, "reasoning", "content", final)

    def _until(self, marker: str, kind: Literal["content", "reasoning"], then: State, final: bool) -> list[Delta]:
        at = self._text.find(marker)
        if at >= 0:
            piece, self._text, self._state = self._text[:at], self._text[at + len(marker) :], then
        else:
            held = 0 if final else _overlap(self._text, marker)
            piece = self._text[: len(self._text) - held]
            self._text = self._text[len(piece) :]
        return [Delta(kind, piece)] if piece else []

    def _call(self, final: bool) -> list[Delta]:
        """Wait for the closing marker after which the body is whole: one inside a string argument does not count."""
        at = self._text.find(CALL_END)
        while at >= 0:
            parsed = _read_call(self._text[:at].strip())
            if parsed is not None:
                self._text, self._state = self._text[at + len(CALL_END) :], "content"
                index = self._calls
                self._calls += 1
                return [Delta("tool_name", parsed[0], index), Delta("tool_arguments", parsed[1], index)]
            at = self._text.find(CALL_END, at + 1)
        if final and CALL_END in self._text:
            self.malformed = self.malformed or "a tool call is not a JSON object with name and arguments"
            self._text, self._state = self._text.split(CALL_END, 1)[1], "content"
        return []


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``marker``."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-n:])), 0)


def _read_call(body: str) -> tuple[str, str] | None:
    try:
        value = json.loads(body)
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    return value["name"], json.dumps(value.get("arguments", {}), ensure_ascii=False)
