from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from infra.inference.messages import Message
from serving.timeline import Timeline
from serving.turn import TurnReader, wire_delta
from tests.serving.scripted import renderer, said, text_ids


def read(ids: list[int]) -> tuple[TurnReader, list[dict[str, Any]]]:
    reader = TurnReader(renderer())
    deltas = [delta for token in ids for delta in reader.feed(token)] + reader.finish()
    return reader, [wire_delta(delta, reasoning_content=True) for delta in deltas]


def joined(chunks: list[dict[str, Any]], field: str) -> str:
    return "".join(chunk[field] for chunk in chunks if field in chunk)


def test_thinking_and_answer_are_kept_apart_and_nothing_is_lost() -> None:
    reader, chunks = read(said("a<b </think> c", "def <|end|> ghi"))
    assert joined(chunks, "reasoning") == joined(chunks, "reasoning_content") == reader.reasoning == "a<b </think> c"
    assert joined(chunks, "content") == reader.content == "def <|end|> ghi"


def test_stream_and_renderer_agree_on_every_cut() -> None:
    whole = said("think 🌍", None, ("add", '{"a":{"b":1},"c":"🌍}}"}'))
    for cut in range(len(whole) + 1):
        reader, chunks = read(whole[:cut])
        parsed = renderer().parse(whole[:cut])
        assert (reader.reasoning or "") == (parsed.message.thinking or "")
        names = [call.name for call in parsed.message.tool_calls if call.name]  # one cut before its name is not shown
        assert [call["function"]["name"] for call in reader.tool_calls()] == names
        assert joined(chunks, "reasoning") == (reader.reasoning or "")


@pytest.mark.parametrize("text", ["x🌍y", "नमस्ते क्षि", "e\u0301a", "\u2028 \u0085", "👩‍👩‍👧"])
def test_characters_of_many_tokens_stay_whole(text: str) -> None:
    assert len(text_ids(text)) >= len(text.encode())
    reader, chunks = read(said(text, text))
    assert (joined(chunks, "reasoning"), joined(chunks, "content")) == (text, text)
    assert (reader.reasoning, reader.content) == (text, text)


@pytest.mark.parametrize("arguments", ['{"a":{"b":1}}', "{}", '{"a":"}}"}', "not json"])
def test_a_call_is_announced_once_and_its_arguments_arrive_whole(arguments: str) -> None:
    reader, chunks = read(said("t", None, ("budget_check", arguments)))
    calls = list(itertools.chain.from_iterable(chunk.get("tool_calls", []) for chunk in chunks))
    assert [call["function"]["name"] for call in calls if "name" in call["function"]] == ["budget_check"]
    assert "".join(call["function"]["arguments"] for call in calls) == arguments
    assert {call["index"] for call in calls} == {0}
    assert [call["id"] for call in calls if "id" in call] == [reader.tool_calls()[0]["id"]]
    assert reader.tool_calls()[0]["function"] == {"name": "budget_check", "arguments": arguments}
    assert reader.content is None


def test_a_call_without_arguments_is_announced_at_the_end() -> None:
    ids = said(None, None, ("now", ""))
    reader, chunks = read(ids)
    assert reader.tool_calls()[0]["function"] == {"name": "now", "arguments": ""}
    assert len([chunk for chunk in chunks if "tool_calls" in chunk]) == 1


def test_what_was_sent_can_be_rendered_back() -> None:
    ids = said("t", None, ("add", '{"a":1}'))
    message = renderer().parse(ids).message
    assert isinstance(message, Message)
    assert said(message.thinking, None, (message.tool_calls[0].name, message.tool_calls[0].arguments)) == ids
    assert json.loads(message.tool_calls[0].arguments) == {"a": 1}


def test_first_token_and_first_answer_token_are_two_instants() -> None:
    line = Timeline(arrived=10.0, started=10.02)
    for at, reasoning in ((10.1, True), (10.5, True), (10.9, False), (11.2, False)):
        line.token(at)
        line.delta(at, reasoning=reasoning)
    figures = line.metrics(
        ended=11.2,
        completion_tokens=4,
        reasoning_tokens=2,
        thinking_budget=None,
        thinking_exhausted=False,
        latency_budget=1.0,
    )
    assert figures.time_to_first_token_ms == pytest.approx(100)
    assert figures.time_to_first_answer_token_ms == pytest.approx(900)
    assert figures.e2e_latency_ms == pytest.approx(1200)
    assert figures.queue_time_ms == pytest.approx(20)
    assert figures.reasoning_time_ms == pytest.approx(800)
    assert figures.generation_time_ms == pytest.approx(1100)
    assert figures.mean_itl_ms == pytest.approx(1100 / 3)
    assert figures.tokens_per_second == pytest.approx(4 / 1.18)
    assert figures.thinking_token_ratio == 0.5
    assert (figures.latency_budget_ms, figures.latency_budget_met) == (1000, False)


def test_what_did_not_happen_is_null() -> None:
    figures = Timeline(arrived=0.0).metrics(
        ended=1.0,
        completion_tokens=0,
        reasoning_tokens=0,
        thinking_budget=None,
        thinking_exhausted=False,
        latency_budget=None,
    )
    empty = {name for name, value in figures.payload().items() if value is None}
    assert empty == {
        "time_to_first_token_ms",
        "time_to_first_answer_token_ms",
        "queue_time_ms",
        "reasoning_time_ms",
        "generation_time_ms",
        "mean_itl_ms",
        "tokens_per_second",
        "thinking_token_ratio",
        "thinking_token_budget",
        "latency_budget_ms",
        "latency_budget_met",
    }


def test_one_thinking_token_only() -> None:
    line = Timeline(arrived=0.0, started=0.0)
    line.token(0.1)
    line.delta(0.1, reasoning=True)
    figures = line.metrics(
        ended=0.1,
        completion_tokens=1,
        reasoning_tokens=1,
        thinking_budget=None,
        thinking_exhausted=False,
        latency_budget=None,
    )
    assert (figures.mean_itl_ms, figures.time_to_first_answer_token_ms) == (None, None)
    assert (figures.generation_time_ms, figures.reasoning_time_ms, figures.thinking_token_ratio) == (0, 0, 1.0)
