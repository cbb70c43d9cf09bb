"""Renderer of the ``tiny-moe`` preset: every boundary is one control token.

A turn is ``[<|think|> thinking <|/think|>] <|tool|> name <|args|> json <|call|>`` or
``[<|think|> thinking <|/think|>] <|answer|> text <|end|>``.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from infra.compute import tokenizer as vocabulary
from infra.compute.tokenizer import encode_text, token_bytes
from infra.inference.messages import Message, ToolCall, ToolSchema
from infra.inference.renderers.base import Delta, DeltaKind, ParsedTurn, RenderedDemonstration

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class TinyRenderer:
    """Implements :class:`~infra.inference.renderers.base.Renderer` over the preset's tokenizer.

    The tools are not listed in the prompt: a model of this size learns them from demonstrations.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self._id = {token: int(tokenizer.convert_tokens_to_ids(token)) for token in vocabulary.CONTROL_TOKENS}
        self.control_names = {number: name for name, number in self._id.items()}
        self.token_bytes = token_bytes(tokenizer)
        self.stop_ids = frozenset({self._id[vocabulary.CALL], self._id[vocabulary.END]})

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """Ids of a conversation up to the point where the assistant speaks."""
        ids: list[int] = []
        for message in messages:
            ids += self._message(message)
        return ids

    def tool_results(self, results: Sequence[Message]) -> list[int]:
        """``<|result|> content <|/result|>`` per result."""
        return self.prompt(results, ())

    def demonstration(
        self, prompt: Sequence[Message], messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> RenderedDemonstration:
        """Assistant messages are trained on, their end markers included; tool results are not."""
        ids: list[int] = []
        mask: list[int] = []
        for message in messages:
            piece = self._message(message)
            ids += piece
            mask += [int(message.role == "assistant")] * len(piece)
        return RenderedDemonstration(tuple(self.prompt(prompt, tools)), tuple(ids), tuple(mask))

    def parse(self, ids: Sequence[int]) -> ParsedTurn:
        """Read one turn; text outside of any block makes it malformed."""
        parser = TinyStreamParser(self)
        deltas = [delta for token in ids for delta in parser.feed(token)] + parser.finish()

        def text(kind: DeltaKind, index: int = 0) -> str:
            return "".join(d.text for d in deltas if d.kind == kind and d.index == index)

        calls = tuple(
            ToolCall(name=text("tool_name", i), arguments=text("tool_arguments", i)) for i in range(parser.calls)
        )
        complete = bool(ids) and ids[-1] in self.stop_ids
        content = text("content") if parser.answered else None
        malformed = parser.malformed
        if complete and malformed is None:
            if ids[-1] == self._id[vocabulary.CALL] and not calls:
                malformed = "a call marker without a tool"
            elif ids[-1] == self._id[vocabulary.END] and not parser.answered:
                malformed = "the turn ended without an answer"
        message = Message(
            role="assistant", content=content, thinking=text("reasoning") if parser.thought else None, tool_calls=calls
        )
        return ParsedTurn(message, parser.reasoning_tokens, complete, malformed)

    def stream_parser(self) -> TinyStreamParser:
        """A parser for one streamed turn."""
        return TinyStreamParser(self)

    def forced_end_of_thinking(self) -> list[int]:
        """``<|/think|> <|answer|>``: thinking is over and the answer begins."""
        return [self._id[vocabulary.THINK_END], self._id[vocabulary.ANSWER]]

    def _text(self, text: str) -> list[int]:
        return encode_text(self.tokenizer, text)

    def _message(self, message: Message) -> list[int]:
        control = self._id
        if message.role in ("system", "user"):
            start = control[vocabulary.SYSTEM if message.role == "system" else vocabulary.USER]
            return [start, *self._text(message.content or ""), control[vocabulary.END]]
        if message.role == "tool":
            return [control[vocabulary.RESULT], *self._text(message.content or ""), control[vocabulary.RESULT_END]]
        ids: list[int] = []
        if message.thinking is not None:
            ids += [control[vocabulary.THINK], *self._text(message.thinking), control[vocabulary.THINK_END]]
        for call in message.tool_calls:
            ids += [control[vocabulary.TOOL], *self._text(call.name), control[vocabulary.ARGS]]
            ids += [*self._text(call.arguments), control[vocabulary.CALL]]
        if not message.tool_calls:
            ids += [control[vocabulary.ANSWER], *self._text(message.content or ""), control[vocabulary.END]]
        return ids


class TinyStreamParser:
    """A state machine over control tokens; a character split over tokens is held back until it is whole."""

    _OPENS: ClassVar[dict[str, DeltaKind]] = {
        vocabulary.THINK: "reasoning",
        vocabulary.TOOL: "tool_name",
        vocabulary.ARGS: "tool_arguments",
        vocabulary.ANSWER: "content",
    }
    _CLOSES: ClassVar[dict[str, DeltaKind]] = {
        vocabulary.THINK_END: "reasoning",
        vocabulary.CALL: "tool_arguments",
        vocabulary.END: "content",
    }

    def __init__(self, renderer: TinyRenderer) -> None:
        self._renderer = renderer
        self._names = renderer.control_names
        self._state: DeltaKind | None = None
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.reasoning_tokens = 0
        self.calls = 0
        self.thought = False
        self.answered = False
        self.malformed: str | None = None

    def feed(self, token: int) -> list[Delta]:
        """Pieces that became certain with this token."""
        name = self._names.get(token)
        if name is None:
            return self._text_token(token)
        flushed = self.finish()
        if name in self._OPENS:
            self._open(name)
        elif name in self._CLOSES:
            if self._state != self._CLOSES[name]:
                self._complain(f"{name} closes a block that is not open")
            self._state = None
        else:
            self._complain(f"{name} is not the assistant's to write")
        return flushed

    def finish(self) -> list[Delta]:
        """What is held back: a character cut short becomes U+FFFD."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return [self._delta(text)] if text and self._state is not None else []

    def _text_token(self, token: int) -> list[Delta]:
        if self._state is None:
            self._complain("text outside of any block")
            return []
        if self._state == "reasoning":
            self.reasoning_tokens += 1
        text = self._utf8.decode(self._renderer.token_bytes[token])
        return [self._delta(text)] if text else []

    def _open(self, name: str) -> None:
        kind = self._OPENS[name]
        expected = "tool_name" if name == vocabulary.ARGS else None
        if self._state != expected:
            self._complain(f"{name} opens a block inside another one")
        if kind == "reasoning":
            if self.thought:
                self._complain("a second thinking block in one turn")
            self.thought = True
        elif kind == "tool_name":
            self.calls += 1
        elif kind == "content":
            if self.answered:
                self._complain("a second answer in one turn")
            self.answered = True
        self._state = kind

    def _delta(self, text: str) -> Delta:
        assert self._state is not None
        return Delta(self._state, text, max(0, self.calls - 1) if self._state.startswith("tool") else 0)

    def _complain(self, what: str) -> None:
        self.malformed = self.malformed or what
