"""One assistant turn, from sampled ids to what the caller sees; streamed and whole replies share it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

from infra.inference.renderers.base import Delta, ParsedTurn, Renderer


@dataclass(frozen=True)
class TextDelta:
    """A piece of thinking or of the answer."""

    text: str
    reasoning: bool


@dataclass(frozen=True)
class CallStart:
    """A tool call begins; its name is whole and sent once."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of a tool call's JSON arguments."""

    index: int
    text: str


TurnDelta = TextDelta | CallStart | CallArguments


@dataclass
class _Call:
    name: str = ""
    call_id: str = ""
    """Empty until the call has been announced."""
    arguments: str = ""


@dataclass
class TurnReader:
    """Feeds sampled ids to the renderer's stream parser and keeps what came out."""

    renderer: Renderer
    tokens: list[int] = field(default_factory=list)
    _text: dict[bool, list[str]] = field(default_factory=lambda: {True: [], False: []})
    _calls: list[_Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._parser = self.renderer.stream_parser()

    def feed(self, token: int) -> list[TurnDelta]:
        """What became certain with this id."""
        self.tokens.append(token)
        return [out for delta in self._parser.feed(token) for out in self._take(delta)]

    def finish(self) -> list[TurnDelta]:
        """What was held back until the end of the turn."""
        out = [made for delta in self._parser.finish() for made in self._take(delta)]
        return out + [made for index in range(len(self._calls)) for made in self._announce(index)]

    def parsed(self) -> ParsedTurn:
        """The renderer's own reading of all ids: token counts and format errors."""
        return self.renderer.parse(self.tokens)

    @property
    def has_calls(self) -> bool:
        """Did the turn call a tool?"""
        return bool(self._calls)

    @property
    def reasoning(self) -> str | None:
        """All thinking, or None."""
        return "".join(self._text[True]) or None

    @property
    def content(self) -> str | None:
        """The whole answer, or None."""
        return "".join(self._text[False]) or None

    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls in OpenAI's form."""
        return [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self._calls
        ]

    def _take(self, delta: Delta) -> list[TurnDelta]:
        if delta.kind == "reasoning" or delta.kind == "content":
            reasoning = delta.kind == "reasoning"
            self._text[reasoning].append(delta.text)
            return [TextDelta(delta.text, reasoning)]
        while len(self._calls) <= delta.index:
            self._calls.append(_Call())
        call = self._calls[delta.index]
        if delta.kind == "tool_name":
            call.name += delta.text
            return []
        call.arguments += delta.text
        return [*self._announce(delta.index), CallArguments(delta.index, delta.text)]

    def _announce(self, index: int) -> list[TurnDelta]:
        call = self._calls[index]
        if call.call_id:
            return []
        call.call_id = f"call_{secrets.token_hex(12)}"
        return [CallStart(index, call.call_id, call.name)]


def wire_delta(delta: TurnDelta, *, reasoning_content: bool) -> dict[str, Any]:
    """A delta in OpenAI's form."""
    if isinstance(delta, TextDelta):
        if not delta.reasoning:
            return {"content": delta.text}
        return {"reasoning": delta.text} | ({"reasoning_content": delta.text} if reasoning_content else {})
    if isinstance(delta, CallStart):
        function = {"name": delta.name, "arguments": ""}
        return {"tool_calls": [{"index": delta.index, "id": delta.call_id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}
