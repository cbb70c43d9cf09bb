"""Rollout: ids as sampled, tools answered, and what could not be judged kept apart from what was wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from data_contracts.records import Task
from domain_rewards.runtime import DomainRuntime
from infra.compute.policy import LoadedPolicy, build_policy
from infra.inference.engine import SamplingParams, StopReason, TokenEvent
from infra.inference.messages import Message, ToolCall
from rl.rollout import EpisodeRequest, Rollout, RolloutSettings, play
from rl.trajectory import EpisodeEnd, staleness
from tests import toy

SETTINGS = RolloutSettings(max_tokens=200, max_turns=4, temperature=1.0)


class ScriptedEngine:
    """Plays fixed token lists, one per turn, for every sequence; implements ``Engine``."""

    def __init__(self, turns: Sequence[Sequence[int]], context: int = 200) -> None:
        self.turns, self.context, self.weight_version = [list(turn) for turn in turns], context, 7
        self.prompts: list[list[int]] = []
        self.extended: list[list[int]] = []
        self.released: list[int] = []
        self._live: dict[int, tuple[list[int], int, SamplingParams]] = {}

    def submit(self, prompt: Sequence[int], sampling: Sequence[SamplingParams]) -> list[int]:
        self.prompts.append(list(prompt))
        handles = []
        for params in sampling:
            handle = len(self._live) + len(self.released)
            self._live[handle] = (list(self.turns[0]), 0, params)
            handles.append(handle)
        return handles

    def extend(self, sequence: int, tokens: Sequence[int]) -> None:
        self.extended.append(list(tokens))
        _, turn, params = self._live[sequence]
        self._live[sequence] = (list(self.turns[turn + 1]), turn + 1, params)

    def step(self) -> list[TokenEvent]:
        events = []
        for handle, (left, _, params) in self._live.items():
            if left:
                token = left.pop(0)
                reason = StopReason.STOP if token in params.stop_ids else None if left else StopReason.LENGTH
                events.append(TokenEvent(handle, token, -0.5, reason))
        return events

    def release(self, sequence: int) -> None:
        self.released.append(sequence)
        del self._live[sequence]


def policy() -> LoadedPolicy:
    return build_policy(toy.MODEL, ["double 3"], 0)


def turn(policy: LoadedPolicy, message: Message) -> list[int]:
    return list(policy.renderer.demonstration([], [message], ()).ids)


def run(
    engine: ScriptedEngine, policy: LoadedPolicy, runtime: DomainRuntime, count: int = 1, of: Task | None = None
) -> list[Rollout]:
    task = of or toy.tasks(4)[3]
    requests = [EpisodeRequest(task, seed) for seed in range(count)]
    return asyncio.run(play(engine, policy.renderer, runtime, requests, SETTINGS))


def call(arguments: str, name: str = "double") -> Message:
    return Message(role="assistant", thinking="t", tool_calls=(ToolCall(name=name, arguments=arguments),))


def test_a_tool_call_is_answered_and_the_ids_are_kept_as_they_were() -> None:
    p = policy()
    first, last = turn(p, call('{"number":3}')), turn(p, Message(role="assistant", content="6"))
    engine = ScriptedEngine([first, last])
    one, two = run(engine, p, toy.runtime(), count=2)
    result = p.renderer.tool_results([Message(role="tool", name="double", content='{"value":6}')])
    assert engine.extended == [result, result]
    assert len(engine.prompts) == 1, "a group's prompt is submitted once"
    trajectory = one.trajectory
    assert list(trajectory.ids) == first + result + last
    assert list(trajectory.mask) == [1] * len(first) + [0] * len(result) + [1] * len(last)
    assert [x for x, m in zip(trajectory.logprobs, trajectory.mask, strict=True) if not m] == [0.0] * len(result)
    assert [(s.kind, s.end - s.start) for s in trajectory.segments] == [
        ("turn", len(first)),
        ("tool_result", len(result)),
        ("turn", len(last)),
    ]
    assert (trajectory.end, trajectory.weight_version, one.verdict.reward) == (EpisodeEnd.ANSWER, 7, 1.0)
    assert trajectory.reasoning_tokens == 1
    assert two.verdict.reward == 1.0
    assert sorted(engine.released) == [0, 1]


def test_the_models_mistakes_are_answered_and_the_episode_goes_on() -> None:
    p = policy()
    wrong = [call("{}"), call('{"number":"x"}'), call("{", "nothing")]
    engine = ScriptedEngine([*(turn(p, each) for each in wrong), turn(p, Message(role="assistant", content="6"))])
    (rollout,) = run(engine, p, toy.runtime())
    assert rollout.verdict.reward == 1.0
    assert rollout.episode is not None
    results = [m.content or "" for m in rollout.episode.messages if m.role == "tool"]
    assert len(results) == 3
    assert all(result.startswith('{"error":') for result in results)


def test_a_failing_tool_leaves_the_episode_unjudged() -> None:
    p = policy()
    (rollout,) = run(ScriptedEngine([turn(p, call('{"number":-1}'))]), p, toy.runtime())
    assert rollout.verdict.reward is None
    assert rollout.trajectory.end is EpisodeEnd.TOOL_FAILURE
    assert "doubling service is down" in str(rollout.verdict.evidence)


def test_an_environment_that_cannot_be_opened_has_no_turns_and_no_reward() -> None:
    class Closed(toy.Doubling):
        async def setup(self) -> None:
            raise ConnectionError("no database")

    p = policy()
    engine = ScriptedEngine([[]])
    runtime = DomainRuntime(Closed, {}, (toy.doubled,), None)
    (rollout,) = run(engine, p, runtime)
    assert engine.prompts == []
    assert rollout.trajectory.ids == ()
    assert rollout.verdict.reward is None
    assert "no database" in str(rollout.verdict.evidence)


def test_a_crashing_verifier_is_unjudged_not_zero() -> None:
    p = policy()
    engine = ScriptedEngine([turn(p, Message(role="assistant", content="6"))])
    (rollout,) = run(engine, p, toy.runtime(toy.crashing))
    assert rollout.verdict.reward is None


def test_cut_malformed_and_endless_episodes_are_told_apart() -> None:
    p = policy()
    answer = turn(p, Message(role="assistant", content="6"))
    (cut,) = run(ScriptedEngine([answer[:-1]]), p, toy.runtime())
    assert (cut.trajectory.end, cut.verdict.reward) == (EpisodeEnd.LENGTH, 0.0)
    (malformed,) = run(ScriptedEngine([[answer[-1]]]), p, toy.runtime())
    assert (malformed.trajectory.end, malformed.verdict.reward) == (EpisodeEnd.MALFORMED, 0.0)
    (endless,) = run(ScriptedEngine([turn(p, call('{"number":3}'))] * 9), p, toy.runtime())
    assert (endless.trajectory.end, endless.verdict.reward) == (EpisodeEnd.TURNS, 0.0)
    assert sum(s.kind == "turn" for s in endless.trajectory.segments) == SETTINGS.max_turns


def test_a_full_context_ends_the_episode_instead_of_the_run() -> None:
    p = policy()
    first = turn(p, call('{"number":3}'))
    (rollout,) = run(ScriptedEngine([first, first], context=len(first) + 12), p, toy.runtime())
    assert rollout.trajectory.end is EpisodeEnd.LENGTH


def test_ro_10_staleness_is_that_of_the_oldest_token() -> None:
    """RO-10: token versions 3, 3, 7 at version 8 are 5 behind, 3.667 on the mean."""
    stale = staleness([3, 3, 7], 8)
    assert stale.largest == 5
    assert stale.mean == pytest.approx(3.667, abs=1e-3)
    assert staleness([8], 8).largest == 0
    with pytest.raises(ValueError, match="do not lie at or before"):
        staleness([9], 8)
    with pytest.raises(ValueError, match="do not lie at or before"):
        staleness([], 8)
