"""Messages of a demonstration: read strictly, and well formed as a conversation that ends in an answer."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter, ValidationError

from infra.hashing import canonical_json
from infra.inference.messages import Message

MESSAGES: TypeAdapter[tuple[Message, ...]] = TypeAdapter(tuple[Message, ...])


def read_messages(value: Any) -> tuple[Message, ...]:
    """The messages after the prompt, from a JSON list of message payloads.

    Raises:
        ValueError: no list, an unknown key or wrong type, a role other than assistant and tool, a tool message that
            answers no call, a call without a tool message, or no final answer. The message is one short line.
    """
    if not isinstance(value, list):
        raise ValueError("messages: not a list")
    messages = parse_messages(canonical_json(value))
    _check_turns(messages)
    return messages


def parse_messages(text: str) -> tuple[Message, ...]:
    """Messages from the JSON text of a list of payloads; unknown keys and wrong types are refused (``ValueError``)."""
    try:
        return MESSAGES.validate_json(text, strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, problem["loc"]))
        raise ValueError(f"messages.{place}: {problem['msg'].removeprefix('Input ')}") from None


def messages_text(messages: tuple[Message, ...]) -> str:
    """Canonical JSON without absent keys: the form kept in Parquet, from which the same messages come back."""
    return canonical_json([message.model_dump(mode="json", exclude_defaults=True) for message in messages])


def _check_turns(messages: tuple[Message, ...]) -> None:
    waiting: list[str] = []
    for index, message in enumerate(messages):
        place = f"messages.{index}"
        if message.role == "tool":
            if not waiting:
                raise ValueError(f"{place}: a tool message that answers no call")
            if message.tool_calls:
                raise ValueError(f"{place}: a tool message cannot call tools")
            if message.name is not None and message.name not in waiting:
                raise ValueError(f"{place}: {message.name!r} was not called")
            waiting.remove(message.name if message.name is not None else waiting[0])
        elif message.role == "assistant":
            if waiting:
                raise ValueError(f"{place}: the call of {waiting[0]!r} has no tool message")
            waiting = [call.name for call in message.tool_calls]
        else:
            raise ValueError(f"{place}: role {message.role!r}; only assistant and tool messages follow the prompt")
    if waiting or not messages or messages[-1].role != "assistant":
        raise ValueError("messages: the last one must be the assistant's answer, without tool calls")
    if messages[-1].content is None:
        raise ValueError(f"messages.{len(messages) - 1}: the final answer has no content")
