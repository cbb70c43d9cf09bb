from __future__ import annotations

import json
from typing import Any

import pytest

from serving.errors import ApiError
from serving.request import ChatRequest, conversation, parse_chat_request, tool_schemas


def parse(**fields: Any) -> ChatRequest:
    body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]} | fields
    return parse_chat_request(json.dumps(body).encode())


def read_all(**fields: Any) -> None:
    request = parse(**fields)
    conversation(request)
    tool_schemas(request)


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read_all(**fields)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize("field", ["api_base", "base_url", "guided_json", "best_of", "no_such_field"])
def test_unknown_fields_are_refused_by_name(field: str) -> None:
    error = refusal(**{field: "http://127.0.0.1:9/"})
    assert (error.param, error.code) == (field, "unknown_parameter")
    assert "127.0.0.1" not in error.what


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("logit_bias", {"5": 1.0}),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("logprobs", True),
        ("stop", ["\n\n"]),
        ("response_format", {"type": "json_object"}),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_what_the_engine_cannot_do_is_refused(field: str, value: object) -> None:
    error = refusal(**{field: value})
    assert error.code == "unsupported_parameter"
    assert field in error.what


def test_neutral_values_of_unsupported_fields_are_accepted() -> None:
    parse(n=1, logit_bias={}, presence_penalty=0, frequency_penalty=0.0, logprobs=False, stop=None, tool_choice="auto")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "0.5"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 1.1),
        ("max_tokens", 0),
        ("max_completion_tokens", 1.5),
        ("seed", 2**63),
        ("messages", []),
        ("messages", "hi"),
        ("stream", "yes"),
        ("thinking_token_budget", -1),
    ],
)
def test_values_out_of_range_or_of_another_type_are_refused(field: str, value: object) -> None:
    assert refusal(**{field: value}).param == field


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"model": "demo"}', b"\xff\xfe", b'{"model":1,"messages":[]}'])
def test_broken_bodies_are_400(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat_request(body)
    assert caught.value.status == 400


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_non_finite_numbers_are_refused(number: str) -> None:
    body = '{"model":"demo","messages":[{"role":"user","content":"hi"}],"temperature":' + number + "}"
    with pytest.raises(ApiError):
        parse_chat_request(body.encode())


def test_two_names_of_one_limit_must_agree() -> None:
    assert parse(max_tokens=5, max_completion_tokens=5).completion_limit == 5
    assert refusal(max_tokens=5, max_completion_tokens=6).param == "max_completion_tokens"


@pytest.mark.parametrize(
    "spelling",
    [
        {"thinking_token_budget": 7},
        {"thinking_budget": 7},
        {"max_thinking_tokens": 7},
        {"thinking": {"type": "enabled", "budget_tokens": 7}},
        {"reasoning": {"max_tokens": 7}},
    ],
)
def test_every_spelling_of_the_thinking_cap(spelling: dict[str, Any]) -> None:
    assert parse(**spelling).thinking_cap == 7
    assert refusal(**{"thinking_token_budget": 8, "thinking_budget": 7}).param == "thinking_token_budget"


def test_a_thinking_cap_above_the_limit_is_refused() -> None:
    assert refusal(thinking_token_budget=20, max_tokens=10).param == "thinking_token_budget"


def test_reasoning_effort_is_refused_because_no_template_reads_it() -> None:
    assert refusal(reasoning_effort="low").param == "reasoning_effort"


def test_conversation_with_tools() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    request = parse(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": None, "reasoning": "hm", "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ],
        tools=[{"type": "function", "function": {"name": "add"}}],
    )
    system, _, assistant, result = conversation(request)
    assert (system.role, system.content) == ("system", "be brief")
    assert (assistant.thinking, assistant.tool_calls[0].arguments) == ("hm", '{"a":1}')
    assert (result.name, result.tool_call_id, result.content) == ("add", "c1", "2")
    assert [tool.name for tool in tool_schemas(request)] == ["add"]
    assert tool_schemas(request.model_copy(update={"tool_choice": "none"})) == ()


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "tool_call_id": "nobody", "content": "2"},
        {"role": "tool", "content": "2"},
        {"role": "user"},
        {"role": "user", "content": "x", "tool_call_id": "c"},
        {"role": "user", "content": "x", "reasoning": "x"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]},
        {"role": "assistant", "content": "I go on"},
        {"role": "function", "content": "x"},
    ],
)
def test_messages_that_make_no_sense_are_refused(message: dict[str, Any]) -> None:
    assert (refusal(messages=[message]).param or "").startswith("messages")


def test_tools_need_distinct_lawful_names() -> None:
    def tool(name: str, **more: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name} | more}

    assert refusal(tools=[tool("a"), tool("a")]).param == "tools"
    refusal(tools=[tool("a b")])
    assert refusal(tools=[tool("a", strict=True)]).code == "unsupported_parameter"
