"""The chat request: what is accepted, what is refused, and how it becomes our own records.

Fields that change nothing are accepted in their neutral value only (``n: 1``, ``logprobs: false``, …).
Everything else that the engine cannot honour is an error, never ignored.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from infra.inference.messages import Message, ToolCall, ToolSchema
from serving.errors import ApiError, bad_request, not_supported

T = TypeVar("T")
Neutral = Annotated[float, Field(ge=0, le=0)] | None
Nothing = None | list[Any]


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class TextPart(_Wire):
    """A content part; other kinds (images, audio, files) are not supported."""

    type: Literal["text"]
    text: str


class FunctionCall(_Wire):
    """Name and raw JSON arguments of a call."""

    name: str
    arguments: str
    parsed_arguments: Any = None
    """Added to replies by the OpenAI client's ``stream()``; dropped when they come back."""


class WireToolCall(_Wire):
    """A call that the assistant made earlier in the conversation."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class WireMessage(_Wire):
    """A message as clients send it, an echoed reply of ours included."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[WireToolCall] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[Nothing, Field(max_length=0)] = None
    parsed: Any = None
    """Added to replies by the OpenAI client's ``stream()``; dropped when they come back."""


class Function(_Wire):
    """A function the model may call."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class Tool(_Wire):
    """A tool of the request."""

    type: Literal["function"]
    function: Function


class StreamOptions(_Wire):
    """What a stream carries besides its content."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class TextFormat(_Wire):
    """The only response format: plain text."""

    type: Literal["text"]


class ThinkingOption(_Wire):
    """Anthropic's spelling of the thinking cap."""

    type: Literal["enabled"] = "enabled"
    budget_tokens: int = Field(ge=0)


class ReasoningOption(_Wire):
    """OpenRouter's spelling of the thinking cap."""

    max_tokens: int = Field(ge=0)


class ChatRequest(_Wire):
    """Body of ``POST /v1/chat/completions``."""

    model: str = Field(min_length=1, max_length=256)
    messages: list[WireMessage] = Field(min_length=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    thinking_token_budget: int | None = Field(default=None, ge=0)
    thinking_budget: int | None = Field(default=None, ge=0)
    max_thinking_tokens: int | None = Field(default=None, ge=0)
    thinking: ThinkingOption | None = None
    reasoning: ReasoningOption | None = None
    n: Literal[1] | None = None
    presence_penalty: Neutral = None
    frequency_penalty: Neutral = None
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    response_format: TextFormat | None = None
    stop: Annotated[Nothing, Field(max_length=0)] = None
    logit_bias: Annotated[dict[str, float] | None, Field(max_length=0)] = None
    user: str | None = Field(default=None, max_length=512)
    """Accepted and dropped: it is neither logged nor used as a label."""

    @property
    def include_usage(self) -> bool:
        """Does a stream end with a usage chunk?"""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def completion_limit(self) -> int | None:
        """The caller's cap on sampled tokens, thinking included."""
        return _one_value("max_completion_tokens", (self.max_completion_tokens, self.max_tokens))

    @property
    def thinking_cap(self) -> int | None:
        """The caller's cap on thinking tokens, under whichever name it came."""
        names = (
            self.thinking_token_budget,
            self.thinking_budget,
            self.max_thinking_tokens,
            self.thinking.budget_tokens if self.thinking is not None else None,
            self.reasoning.max_tokens if self.reasoning is not None else None,
        )
        return _one_value("thinking_token_budget", names)


def parse_chat_request(body: bytes) -> ChatRequest:
    """Read and check a request body.

    Raises:
        ApiError: 400 with the first field at fault; unknown fields are named, values are not repeated.
    """
    try:
        request = ChatRequest.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from None
    if request.stream_options is not None and not request.stream:
        raise bad_request("'stream_options' needs 'stream': true.", "stream_options")
    limit, cap = request.completion_limit, request.thinking_cap
    if limit is not None and cap is not None and cap > limit:
        raise bad_request("'thinking_token_budget' exceeds 'max_completion_tokens'.", "thinking_token_budget")
    return request


def tool_schemas(request: ChatRequest) -> tuple[ToolSchema, ...]:
    """The tools that the model is told about; none when ``tool_choice`` is ``none``.

    Raises:
        ApiError: 400 when two tools share a name.
    """
    if request.tool_choice == "none":
        return ()
    functions = [tool.function for tool in request.tools or ()]
    if len({function.name for function in functions}) < len(functions):
        raise bad_request("Tool names must be unique.", "tools")
    return tuple(
        ToolSchema(name=f.name, description=f.description or "", parameters=f.parameters or {"type": "object"})
        for f in functions
    )


def conversation(request: ChatRequest) -> tuple[Message, ...]:
    """The messages as records; tool results get the name of the call that they answer.

    Raises:
        ApiError: 400 when a field does not belong to its role, a tool result answers no call, or the last
            message is the assistant's.
    """
    messages: list[Message] = []
    calls: dict[str, str] = {}
    for index, wire in enumerate(request.messages):
        where = f"messages[{index}]"
        _check_role(wire, where)
        if wire.role == "tool":
            assert wire.tool_call_id is not None
            if wire.tool_call_id not in calls:
                raise bad_request("A tool message must answer a tool call made before it.", f"{where}.tool_call_id")
            name = calls[wire.tool_call_id]
            messages.append(Message(role="tool", content=_text(wire), name=name, tool_call_id=wire.tool_call_id))
        elif wire.role == "assistant":
            message = _assistant(wire, where)
            calls.update({call.call_id: call.name for call in message.tool_calls})
            messages.append(message)
        else:
            role: Literal["user", "system"] = "user" if wire.role == "user" else "system"
            messages.append(Message(role=role, content=_text(wire), name=wire.name))
    if messages[-1].role == "assistant":
        raise bad_request("The last message must not be the assistant's.", "messages")
    return tuple(messages)


def _assistant(wire: WireMessage, where: str) -> Message:
    thinking = _one_value(f"{where}.reasoning", (wire.reasoning, wire.reasoning_content))
    calls = tuple(
        ToolCall(name=call.function.name, arguments=call.function.arguments, call_id=call.id)
        for call in wire.tool_calls or ()
    )
    return Message(role="assistant", content=_text(wire), thinking=thinking, tool_calls=calls, name=wire.name)


def _check_role(wire: WireMessage, where: str) -> None:
    of_assistant = {
        "tool_calls": wire.tool_calls,
        "reasoning": wire.reasoning,
        "reasoning_content": wire.reasoning_content,
    }
    if wire.role != "assistant":
        for field, value in of_assistant.items():
            if value is not None:
                raise bad_request(f"'{field}' belongs to assistant messages only.", f"{where}.{field}")
        if wire.content is None:
            raise bad_request("'content' is missing.", f"{where}.content")
    if (wire.tool_call_id is not None) != (wire.role == "tool"):
        raise bad_request("'tool_call_id' belongs to tool messages, which need it.", f"{where}.tool_call_id")


def _text(wire: WireMessage) -> str | None:
    if isinstance(wire.content, list):
        return "".join(part.text for part in wire.content)
    return wire.content


def _one_value(name: str, values: tuple[T | None, ...]) -> T | None:
    given = [value for value in values if value is not None]
    if any(value != given[0] for value in given):
        raise bad_request(f"'{name}' is given twice, with different values.", name)
    return given[0] if given else None


_SWITCHABLE = frozenset(
    {
        "n",
        "presence_penalty",
        "frequency_penalty",
        "logprobs",
        "top_logprobs",
        "response_format",
        "stop",
        "logit_bias",
        "tool_choice",
    }
)


def _refusal(error: ValidationError) -> ApiError:
    """The first problem as a 400; messages never repeat the caller's values."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    location = first["loc"]
    field = str(location[0]) if location else None
    path = _path(location)
    if first["type"] == "json_invalid":
        return bad_request("The body is not valid JSON.", None, "invalid_json")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"Unknown or unsupported field '{path}'.", code="unknown_parameter", param=path)
    if first["type"] == "missing":
        return bad_request(f"'{path}' is missing.", path, "missing_required_parameter")
    if field in _SWITCHABLE:
        return not_supported(field or "", "Leave it out or give its default.")
    if location[-1:] == ("strict",):
        return not_supported(path or "", "Arguments are not constrained to the schema.")
    return bad_request(f"'{path}': {first['msg']}.", path)


def _path(location: tuple[int | str, ...]) -> str | None:
    """``messages[0].content`` from pydantic's location, without the names of union members."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", part) and part not in ("str", "TextPart"):
            path += f".{part}" if path else part
        elif not part.startswith(("list[", "str", "TextPart")):
            path += ".(…)" if path else "(…)"
    return path or None
