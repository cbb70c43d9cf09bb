"""What every renderer does: conversation to token ids, and sampled ids back to a message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from infra.inference.messages import Message, ToolSchema

DeltaKind = Literal["reasoning", "content", "tool_name", "tool_arguments"]


@dataclass(frozen=True)
class ParsedTurn:
    """One sampled turn, read back.

    ``complete`` is False when the turn was cut before its end marker. ``malformed`` says what broke the
    format, or is None. ``reasoning_tokens`` counts the sampled tokens inside the thinking block, its markers
    excluded.
    """

    message: Message
    reasoning_tokens: int
    complete: bool
    malformed: str | None = None


@dataclass(frozen=True)
class Delta:
    """A piece of a streamed turn. ``index`` numbers the tool call that a ``tool_*`` piece belongs to."""

    kind: DeltaKind
    text: str
    index: int = 0


@dataclass(frozen=True)
class RenderedDemonstration:
    """A conversation as ids; ``mask`` is 1 on the ids that the policy itself would have sampled."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    mask: tuple[int, ...]


class StreamParser(Protocol):
    """Reads one turn token by token; what it yields in total equals what ``Renderer.parse`` returns."""

    reasoning_tokens: int

    def feed(self, token: int) -> list[Delta]:
        """Pieces that became certain with this token."""
        ...

    def finish(self) -> list[Delta]:
        """Pieces held back at the end of the turn (an unfinished character, an unfinished marker)."""
        ...


class Renderer(Protocol):
    """Turns a model family's conversations into ids and back. Tokens that were sampled are never rendered again."""

    stop_ids: frozenset[int]

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """Ids of a conversation up to the point where the assistant speaks."""
        ...

    def tool_results(self, results: Sequence[Message]) -> list[int]:
        """Ids to append after a turn that called tools, up to where the assistant speaks again."""
        ...

    def demonstration(
        self, prompt: Sequence[Message], messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> RenderedDemonstration:
        """A worked example as ids with its training mask."""
        ...

    def parse(self, ids: Sequence[int]) -> ParsedTurn:
        """Read one sampled turn."""
        ...

    def stream_parser(self) -> StreamParser:
        """A parser for one streamed turn."""
        ...

    def forced_end_of_thinking(self) -> list[int]:
        """Ids which end a thinking block that has used up its budget."""
        ...
