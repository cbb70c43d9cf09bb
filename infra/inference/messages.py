"""Conversations as typed records; the words follow OpenAI's chat format."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from infra.records import Record

Role = Literal["system", "user", "assistant", "tool"]


class ToolCall(Record):
    """One call that the model asked for; ``arguments`` is the raw JSON text, valid or not."""

    name: str
    arguments: str
    call_id: str = ""


class Message(Record):
    """One message. Assistant messages may carry ``thinking`` and ``tool_calls``; tool messages a ``name``."""

    role: Role
    content: str | None = None
    thinking: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    tool_call_id: str = ""


class ToolSchema(Record):
    """A tool as the model sees it; ``parameters`` is a JSON schema of an object."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
