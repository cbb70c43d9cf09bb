"""Failures met in public trainers, on the engine and what it is asked by the rollout; by their number."""

from __future__ import annotations

import asyncio

import pytest
import torch

from infra.inference.embedded.engine import EmbeddedEngine
from infra.inference.engine import SamplingParams, StopReason, TokenEvent
from rl.rollout import EpisodeRequest, RolloutSettings, play
from tests import toy
from tests.infra.models import tiny_policy
from tests.rl.cold import cold_policy


def turn(engine: EmbeddedEngine, prompt: list[int], params: SamplingParams) -> list[TokenEvent]:
    engine.submit(prompt, [params])
    events: list[TokenEvent] = []
    while not events or events[-1].finished is None:
        events += engine.step()
    engine.release(events[-1].sequence)
    return events


def test_ro_01_the_ids_that_were_sampled_are_kept_even_where_text_would_give_others() -> None:
    """RO-01: ids, log-probs and mask align; a text that another tokenisation spells is not encoded again."""
    from infra.compute.policy import load_policy

    policy = load_policy(cold_policy())
    engine, task = EmbeddedEngine(policy.model), toy.tasks(4)[3]
    requests = [EpisodeRequest(task, seed) for seed in range(16)]
    settings = RolloutSettings(max_tokens=24, max_turns=4, temperature=3.0)
    rollouts = asyncio.run(play(engine, policy.renderer, toy.runtime(), requests, settings))
    differing = 0
    for rollout in rollouts:
        t = rollout.trajectory
        assert len(t.ids) == len(t.logprobs) == len(t.mask)
        assert sum(t.mask) == t.sampled_tokens > 0
        assert all(logprob < 0 for logprob, sampled in zip(t.logprobs, t.mask, strict=True) if sampled)
        text = policy.tokenizer.decode(list(t.ids))
        differing += policy.tokenizer.encode(text, add_special_tokens=False) != list(t.ids)
    assert differing > 0, "or the test could not tell sampled ids from re-encoded ones"


def test_ro_04_every_end_token_ends_a_turn_and_belongs_to_it() -> None:
    """RO-04: two end ids; a turn that ends with either is not truncated, one that reaches the limit is."""
    engine = EmbeddedEngine(tiny_policy().model)
    free = [event.token for event in turn(engine, [5, 6, 7], SamplingParams(max_tokens=5, temperature=0.0))]
    first, second = free[1], free[3]
    assert first != second
    for ends, length in (({first, second}, free.index(first) + 1), ({second, 255}, free.index(second) + 1)):
        events = turn(engine, [5, 6, 7], SamplingParams(max_tokens=5, temperature=0.0, stop_ids=frozenset(ends)))
        assert [event.token for event in events] == free[:length]
        assert events[-1].finished is StopReason.STOP
    cut = turn(engine, [5, 6, 7], SamplingParams(max_tokens=5, temperature=0.0))
    assert (len(cut), cut[-1].finished) == (5, StopReason.LENGTH)


def test_ro_07_and_ro_11_a_sleeping_engine_never_wakes_with_old_weights() -> None:
    """RO-07, RO-11: asleep it refuses; awake it has the newest weights and a higher version."""
    model = tiny_policy().model
    engine = EmbeddedEngine(model)
    old, version = engine.checksum(), engine.weight_version
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    assert engine.checksum() == old, "an update arrives with a sync only"
    engine.sync()
    synced = engine.checksum()
    assert synced != old
    engine.sleep()
    with pytest.raises(RuntimeError):
        engine.submit([5], [SamplingParams(max_tokens=1)])
    engine.wake()
    assert engine.checksum() == synced == EmbeddedEngine(model).checksum()
    assert engine.weight_version > version + 1
    again, fresh = (
        turn(e, [5, 6], SamplingParams(max_tokens=2, temperature=0.0)) for e in (engine, EmbeddedEngine(model))
    )
    assert [(event.token, event.logprob) for event in again] == [(event.token, event.logprob) for event in fresh]
