"""What a verifier sees of one finished attempt."""

from __future__ import annotations

from dataclasses import dataclass

from data_contracts.records import Task
from domain_rewards.environments.base import ToolEnvironment
from infra.inference.messages import Message, ToolCall


@dataclass(frozen=True)
class Episode:
    """One attempt at one task."""

    task: Task
    messages: tuple[Message, ...]
    """Assistant and tool messages after the prompt."""
    finished: bool
    """False when a limit (length, turns, time) cut the attempt: there is no answer then."""
    environment: ToolEnvironment
    """The environment after the last call, with its state."""

    @property
    def answer(self) -> str | None:
        """Content of the final assistant message; None if the episode was cut or ends in anything else.

        Thinking is not part of it: what occurs only in the reasoning is no answer.
        """
        if not self.finished or not self.messages:
            return None
        last = self.messages[-1]
        return last.content if last.role == "assistant" and not last.tool_calls else None

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """All calls of the assistant, in order."""
        return tuple(call for message in self.messages if message.role == "assistant" for call in message.tool_calls)
