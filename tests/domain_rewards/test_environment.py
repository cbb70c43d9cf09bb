"""Tools: schemas, the model's mistakes, failures of the machinery, limits."""

from __future__ import annotations

import asyncio
import json
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domain_rewards.environments.base import ToolEnvironment, ToolFailure, tool
from infra.errors import UsageError
from infra.inference.messages import Message
from tests.domain_rewards.fixtures import Desk, call, desk, make_task


async def answer(environment: ToolEnvironment, name: str, arguments: str = "{}") -> str:
    content = (await environment.call(call(name, arguments))).content
    assert content is not None
    return content


def test_schema_comes_from_hints_and_docstring() -> None:
    schemas = {schema.name: schema for schema in Desk.tools()}
    assert list(schemas)[:3] == ["get_ticket", "search", "refuse"]
    assert schemas["get_ticket"].description == "Read a ticket."
    assert schemas["get_ticket"].parameters == {
        "type": "object",
        "additionalProperties": False,
        "properties": {"id": {"type": "integer"}, "urgent": {"type": "boolean", "default": False}},
        "required": ["id"],
    }
    assert schemas["search"].parameters["properties"]["limit"] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 9,
        "default": 3,
    }


def test_a_tool_is_still_a_method() -> None:
    environment = desk()
    assert environment.get_ticket(7).id == 7
    assert environment.ran == 1


async def test_results_are_compact_json_with_the_calls_id() -> None:
    message = await desk().call(call("get_ticket", '{"id": 7}', "c9"))
    assert message == Message(role="tool", name="get_ticket", content='{"id":7,"note":null}', tool_call_id="c9")
    assert await answer(desk(), "search", '{"words":["a","b"],"limit":1}') == '["a"]'
    assert await answer(desk(), "ratio") == '{"ratio":null}'


async def test_mistakes_of_the_model_are_answered_and_counted_en04() -> None:
    environment = desk()
    calls = [
        call("lookup_order"),
        call("get_ticket", "{}"),
        call("get_ticket", '{"id":"seven"}'),
        call("get_ticket", "null"),
    ]
    replies = [json.loads(message.content or "") for message in await environment.call_all(calls)]
    assert replies == [
        {"error": "unknown_tool"},
        {"error": "missing_argument:id"},
        {"error": "type_error:id"},
        {"error": "bad_arguments"},
    ]
    assert environment.errors == {"unknown_tool": 1, "missing_argument": 1, "type_error": 1, "bad_arguments": 1}
    assert environment.ran == 0


@pytest.mark.parametrize(
    ("name", "arguments", "code"),
    [
        ("get_ticket", '{"id":"7"}', "type_error:id"),  # types are strict, as the schema says
        ("get_ticket", '{"id":7.0}', "type_error:id"),
        ("get_ticket", '{"id":true}', "type_error:id"),
        ("get_ticket", '{"id":7,"force":1}', "unexpected_argument:force"),
        ("get_ticket", '{"id":7', "bad_arguments"),
        ("get_ticket", "[7]", "bad_arguments"),
        ("get_ticket", "", "missing_argument:id"),
        ("get_ticket", '{"id":"\ud800"}', "bad_arguments"),
        ("search", '{"words":"a"}', "type_error:words"),
        ("search", '{"words":["a",2]}', "type_error:words.1"),
        ("search", '{"words":[],"limit":10}', "invalid_argument:limit"),
        ("block", '{"seconds":NaN}', "invalid_argument:seconds"),
        ("get_ticket", "[" * 100_000, "bad_arguments"),
        ("call", "{}", "unknown_tool"),  # methods of the environment are no tools
        ("__init__", "{}", "unknown_tool"),
        ("refuse", "", "closed"),
    ],
)
async def test_error_codes(name: str, arguments: str, code: str) -> None:
    environment = desk()
    assert json.loads(await answer(environment, name, arguments)) == {"error": code}
    assert environment.ran == 0


async def test_a_long_argument_name_is_not_echoed_whole() -> None:
    content = await answer(desk(), "get_ticket", json.dumps({"id": 7, "x" * 5000: 1}))
    assert content == json.dumps({"error": "unexpected_argument:" + "x" * 64}, separators=(",", ":"))


@given(st.text(), st.text())
def test_no_text_of_the_model_raises(name: str, arguments: str) -> None:
    for tool_name in (name, "get_ticket", "search"):
        message = asyncio.run(desk().call(call(tool_name, arguments)))
        json.loads(message.content or "")


async def test_parallel_calls_are_all_answered_in_order_en05() -> None:
    calls = [call("get_ticket", f'{{"id":{number}}}', f"c{number}") for number in (3, 1, 2)]
    replies = await desk().call_all(calls)
    assert [(reply.tool_call_id, json.loads(reply.content or "")["id"]) for reply in replies] == [
        ("c3", 3),
        ("c1", 1),
        ("c2", 2),
    ]


@pytest.mark.parametrize(("name", "cause"), [("crash", "database is down"), ("own_timeout", "did not answer")])
async def test_a_failing_back_end_is_no_mistake_of_the_model_en15(name: str, cause: str) -> None:
    environment = desk()
    with pytest.raises(ToolFailure, match=cause) as raised:
        await environment.call(call(name))
    assert f"task t1, Desk.{name}" in str(raised.value)
    assert not environment.errors


async def test_a_tools_own_failure_is_passed_on_unchanged() -> None:
    with pytest.raises(ToolFailure) as raised:
        await desk().call(call("gives_up"))
    assert (raised.value.what, raised.value.where) == ("license server is gone", "rack 3")


@pytest.mark.parametrize("name", ["block", "wait"])
async def test_time_limit(name: str) -> None:
    environment = desk()
    began = time.monotonic()
    assert await answer(environment, name, '{"seconds":5}') == '{"error":"timeout"}'
    assert time.monotonic() - began < 2
    assert environment.errors == {"timeout": 1}
    assert await answer(environment, name, '{"seconds":0}') == '"done"'


class Careless(ToolEnvironment):
    @tool(timeout_s=0.1)
    def spin(self) -> str:
        """Never ends, and catches what would end it."""
        while True:
            try:
                time.sleep(10)
            except Exception:
                continue

    @tool
    def leave(self) -> str:
        """Ends the process."""
        sys.exit(3)


def test_a_plain_tool_that_never_ends_is_ended() -> None:
    environment = Careless(desk().task, {})
    assert asyncio.run(environment.call(call("spin"))).content == '{"error":"timeout"}'
    assert environment.errors == {"timeout": 1}


def test_a_tool_that_exits_ends_its_episode_only() -> None:
    with pytest.raises(ToolFailure, match="tool leave failed: SystemExit: 3"):
        asyncio.run(Careless(desk().task, {}).call(call("leave")))


def test_a_hanging_isolated_tool_does_not_keep_the_loop_open() -> None:
    began = time.monotonic()
    asyncio.run(desk().call(call("block", '{"seconds":5}')))
    assert time.monotonic() - began < 2


async def test_bytes_and_long_results_en03() -> None:
    assert json.loads(await answer(desk(), "raw", '{"size":1}')) == "ok \ufffd\ufffd\nx"
    content = await answer(desk(), "raw", '{"size":2000000}')
    assert content.endswith("x…[1991817 characters dropped]")
    assert content.index("…") == Desk.max_result_chars


async def test_tools_are_inherited_and_overridden() -> None:
    class Senior(Desk):
        @tool
        def refuse(self) -> str:
            """Says yes."""
            return "open"

        def crash(self) -> None:  # hides the tool
            """No tool any more."""

        @tool
        def extra(self) -> int:
            """One more."""
            return 1

    names = [schema.name for schema in Senior.tools()]
    assert names[-1] == "extra"
    assert "crash" not in names
    assert await answer(Senior(make_task(), {}), "refuse") == '"open"'
    assert await answer(desk(), "refuse") == '{"error":"closed"}'


def test_unusable_tools_are_refused() -> None:
    class Untyped(ToolEnvironment):
        @tool
        def look(self, where) -> str:  # type: ignore[no-untyped-def]
            """Look."""
            return str(where)

    class Unreadable(ToolEnvironment):
        @tool
        def look(self, where: time.struct_time) -> str:
            """Look."""
            return str(where)

    with pytest.raises(UsageError, match="parameter where has no type hint") as raised:
        Untyped.tools()
    assert "test_environment.py:" in raised.value.where
    assert raised.value.what.count("cannot be offered") == 1
    with pytest.raises(UsageError, match="cannot be read from JSON") as raised:
        Unreadable.tools()
    assert len(str(raised.value).splitlines()) == 3
    with pytest.raises(UsageError, match="method of every environment: close"):

        class Clash(ToolEnvironment):
            @tool
            def close(self) -> str:  # type: ignore[override]
                """Close a ticket."""
                return ""


def test_the_default_conversation_is_the_prompt() -> None:
    assert Desk.messages(make_task()) == (Message(role="user", content="question"),)
