from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from infra.inference.engine import SamplingParams, StopReason
from serving.errors import ApiError
from serving.worker import EngineWorker, Event, Generation, Piece, Started, ThinkingCap
from tests.serving.scripted import ScriptedEngine, renderer, said, text_ids, wait_until

ENDLESS = [5] * 100_000


@contextmanager
def worker(engine: ScriptedEngine, max_running: int = 32, max_waiting: int = 128) -> Iterator[EngineWorker]:
    running = EngineWorker(engine, "test-engine", max_running=max_running, max_waiting=max_waiting)
    try:
        yield running
    finally:
        running.close()


def params(max_tokens: int = 1000, seed: int = 3) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, stop_ids=renderer().stop_ids, seed=seed)


async def read(generation: Generation) -> tuple[list[int], StopReason | None]:
    tokens: list[int] = []
    async with asyncio.timeout(5):
        while True:
            event = await generation.next()
            if isinstance(event, ApiError):
                raise event
            if isinstance(event, Piece):
                tokens += event.tokens
                if event.finished is not None:
                    return tokens, event.finished


async def test_many_requests_share_the_engine_and_each_gets_its_own_tokens() -> None:
    engine = ScriptedEngine(lambda prompt: said(None, "x" * prompt[0]), step_s=0.001)
    with worker(engine, max_running=4) as running:
        results = await asyncio.gather(*(read(running.submit([n], params())) for n in range(1, 9)))
    assert [tokens for tokens, _ in results] == [said(None, "x" * n) for n in range(1, 9)]
    assert {reason for _, reason in results} == {StopReason.STOP}
    assert sorted(engine.released) == list(range(8))
    assert engine.steps < sum(len(tokens) for tokens, _ in results)


async def test_a_cancelled_request_is_released_before_the_next_step() -> None:
    allowed = threading.Semaphore(0)
    engine = ScriptedEngine(lambda _: ENDLESS, before_step=allowed.acquire)
    with worker(engine) as running:
        generation = running.submit([1], params())
        assert isinstance(await generation.next(), Started)
        allowed.release()
        assert isinstance(await generation.next(), Piece)
        generation.cancel()
        allowed.release(2)  # the engine may be inside one more step already
        await asyncio.to_thread(wait_until, lambda: engine.released == [0])
    assert engine.produced <= 2


async def test_a_cancelled_request_never_starts_when_it_was_still_waiting() -> None:
    engine = ScriptedEngine(lambda _: ENDLESS, step_s=0.001)
    with worker(engine, max_running=1) as running:
        first = running.submit([1], params())
        second = running.submit([2], params())
        await first.next()
        second.cancel()
        first.cancel()
        third = running.submit([3], params(max_tokens=1))
        await read(third)
    assert engine.prompts == [(1,), (3,)]


async def test_a_full_queue_refuses_and_recovers() -> None:
    engine = ScriptedEngine(lambda _: ENDLESS, step_s=0.001)
    with worker(engine, max_running=1, max_waiting=1) as running:
        open_requests = [running.submit([n], params()) for n in (1, 2)]
        with pytest.raises(ApiError) as caught:
            running.submit([3], params())
        assert (caught.value.status, caught.value.code, caught.value.retry_after) == (503, "engine_overloaded", 1)
        for generation in open_requests:
            generation.cancel()
        await asyncio.to_thread(wait_until, lambda: engine.open == 0)
        await asyncio.sleep(0.05)
        assert await read(running.submit([4], params(max_tokens=2))) == ([5, 5], StopReason.LENGTH)


async def test_an_engine_that_breaks_ends_every_request_with_an_error() -> None:
    def explode() -> None:
        raise RuntimeError("device lost")

    engine = ScriptedEngine(lambda _: ENDLESS, before_step=explode)
    with worker(engine) as running:
        generations = [running.submit([n], params()) for n in (1, 2)]
        for generation in generations:
            with pytest.raises(ApiError) as caught:
                await read(generation)
            assert (caught.value.status, caught.value.code) == (500, "engine_failed")
            assert "device lost" not in caught.value.what
        await asyncio.to_thread(wait_until, lambda: not running.alive)
        with pytest.raises(ApiError):
            running.submit([3], params())


async def test_a_refused_prompt_leaves_the_engine_to_others() -> None:
    engine = ScriptedEngine(lambda _: said(None, "x"))
    with worker(engine) as running:
        with pytest.raises(ApiError) as caught:
            await read(running.submit([], params()))
        assert caught.value.status == 400
        assert (await read(running.submit([1], params())))[1] is StopReason.STOP


async def test_closing_ends_open_requests() -> None:
    engine = ScriptedEngine(lambda _: ENDLESS, step_s=0.001)
    running = EngineWorker(engine, "test-engine")
    generation = running.submit([1], params())
    await generation.next()
    await asyncio.to_thread(running.close)
    with pytest.raises(ApiError) as caught:
        await read(generation)
    assert caught.value.code == "engine_stopped"


def thinker(prompt: Sequence[int]) -> list[int]:
    """Thinks for 100 tokens; once its thinking has been ended it answers."""
    forced = renderer().forced_end_of_thinking()
    if list(prompt[-len(forced) :]) == forced:
        return [*text_ids("42, I am sure of it"), *renderer().stop_ids]
    return said("z" * 100, "never")


@pytest.mark.parametrize("budget", [0, 1, 5])
async def test_thinking_stops_at_its_cap_and_the_answer_goes_on(budget: int) -> None:
    engine = ScriptedEngine(thinker)
    cap = ThinkingCap(renderer(), budget)
    with worker(engine) as running:
        tokens, reason = await read(running.submit([9], params(max_tokens=budget + 7), cap))
    parsed = renderer().parse(tokens)
    assert cap.exhausted
    assert parsed.reasoning_tokens == budget
    assert parsed.message.thinking == "z" * budget
    assert (parsed.message.content, reason) == ("42, ", StopReason.LENGTH)
    assert len(tokens) == budget + 7  # <|think|>, the thinking, two forced ids, four of the answer
    assert engine.prompts[1] == (9, *tokens[: budget + 3])
    assert engine.sampling[1].seed != engine.sampling[0].seed
    assert engine.open == 0


@pytest.mark.parametrize("thinking", ["", "zzzzz"])
async def test_thinking_that_ends_by_itself_within_the_cap_is_left_alone(thinking: str) -> None:
    engine = ScriptedEngine(lambda _: said(thinking, "fine"))
    cap = ThinkingCap(renderer(), 5)
    with worker(engine) as running:
        tokens, _ = await read(running.submit([9], params(), cap))
    assert (tokens, cap.exhausted, len(engine.prompts)) == (said(thinking, "fine"), False, 1)


async def test_no_room_for_an_answer_after_the_cap_is_a_length_stop() -> None:
    engine = ScriptedEngine(thinker)
    events: list[Event] = []
    with worker(engine) as running:
        generation = running.submit([9], params(max_tokens=7), ThinkingCap(renderer(), 5))
        while not (events and isinstance(events[-1], Piece) and events[-1].finished):
            events.append(await asyncio.wait_for(generation.next(), 5))
    tokens = [token for event in events if isinstance(event, Piece) for token in event.tokens]
    assert tokens == said("z" * 100, "never")[:6]
    assert isinstance(events[-1], Piece)
    assert events[-1].finished is StopReason.LENGTH
    assert engine.open == 0
