"""Rollout: the engine generates, the environment's tools answer, the verifiers judge."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from data_contracts.records import Task
from domain_rewards.environments.base import ToolEnvironment, ToolFailure
from domain_rewards.episode import Episode
from domain_rewards.runtime import DomainRuntime
from domain_rewards.verifiers.judge import Verdict
from infra.inference.engine import Engine, SamplingParams, StopReason, TokenEvent
from infra.inference.messages import Message
from infra.inference.renderers.base import Renderer
from rl.objectives.length import RepetitionStop
from rl.trajectory import EpisodeEnd, Segment, Trajectory


@dataclass(frozen=True)
class RolloutSettings:
    """How episodes are sampled; temperature 0 is greedy.

    With ``run_window``, so many sampled tokens in a row, each with a probability above ``run_threshold``, end an
    episode: it goes round in circles.
    """

    max_tokens: int
    max_turns: int
    temperature: float
    run_window: int | None = None
    run_threshold: float = 0.99


@dataclass(frozen=True)
class EpisodeRequest:
    """One episode to play; ``seed`` makes its samples its own, whatever else is in the batch."""

    task: Task
    seed: int


@dataclass(frozen=True)
class Rollout:
    """A played and judged episode; ``seconds`` is its wall-clock time from submission to its last token.

    ``episode`` is None when its environment could not be opened: it has no turns and no reward.
    """

    trajectory: Trajectory
    episode: Episode | None
    verdict: Verdict
    seconds: float


@dataclass
class _Running:
    """An episode in play."""

    request: EpisodeRequest
    environment: ToolEnvironment | ToolFailure
    prompt: list[int]
    weight_version: int
    started: float
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    turn_start: int = 0
    turns: int = 0
    reasoning_tokens: int = 0
    end: EpisodeEnd | None = None
    failure: ToolFailure | None = None
    finished_at: float = 0.0
    repetition: RepetitionStop | None = None

    def take(self, event: TokenEvent) -> bool:
        """Append a sampled token; whether the turn ends with it."""
        self.ids.append(event.token)
        self.logprobs.append(event.logprob)
        self.mask.append(1)
        if event.finished is None and self.repetition is not None and self.repetition.feed(event.logprob):
            self.end = EpisodeEnd.REPETITION
        return event.finished is not None or self.end is not None

    def append_result(self, ids: Sequence[int]) -> None:
        """Append the tokens of a tool result."""
        start = len(self.ids)
        self.ids += ids
        self.logprobs += [0.0] * len(ids)
        self.mask += [0] * len(ids)
        self.segments.append(Segment("tool_result", start, len(self.ids)))
        self.turn_start = len(self.ids)


async def play(
    engine: Engine,
    renderer: Renderer,
    runtime: DomainRuntime,
    requests: Sequence[EpisodeRequest],
    settings: RolloutSettings,
) -> list[Rollout]:
    """Play all requests at once and judge them; results in the order of the requests.

    Requests of the same task that follow each other share the prompt's computation. Tool calls of one engine
    step run concurrently. A tool that fails for reasons of its own ends its episode unjudged.
    """
    environments = await asyncio.gather(*(_open(runtime, request.task) for request in requests))
    running = _submit(engine, renderer, runtime, list(zip(requests, environments, strict=True)), settings)
    open_episodes = {handle: episode for handle, episode in running if handle is not None}
    while open_episodes:
        turns: list[tuple[int, _Running, StopReason]] = []
        for event in engine.step():
            episode = open_episodes[event.sequence]
            if episode.take(event):
                turns.append((event.sequence, episode, event.finished or StopReason.ABORT))
        await asyncio.gather(
            *(_end_turn(engine, renderer, handle, episode, why, settings) for handle, episode, why in turns)
        )
        for handle, episode, _ in turns:
            if episode.end is not None:
                episode.finished_at = time.monotonic()
                engine.release(handle)
                del open_episodes[handle]
    return list(await asyncio.gather(*(_judged(episode, runtime) for _, episode in running)))


async def _open(runtime: DomainRuntime, task: Task) -> ToolEnvironment | ToolFailure:
    try:
        return await runtime.open(task)
    except ToolFailure as failure:
        return failure


def _submit(
    engine: Engine,
    renderer: Renderer,
    runtime: DomainRuntime,
    requests: Sequence[tuple[EpisodeRequest, ToolEnvironment | ToolFailure]],
    settings: RolloutSettings,
) -> list[tuple[int | None, _Running]]:
    """Open a sequence per episode; neighbours on one task share the prompt. A failed environment gets none."""
    running: list[tuple[int | None, _Running]] = []
    tools = runtime.environment.tools()
    now = time.monotonic()
    for task, members in itertools.groupby(requests, key=lambda pair: pair[0].task):
        group = list(members)
        prompt = renderer.prompt(runtime.environment.messages(task), tools)
        playable = [request for request, environment in group if not isinstance(environment, ToolFailure)]
        sampling = [
            SamplingParams(
                max_tokens=settings.max_tokens,
                temperature=settings.temperature,
                stop_ids=renderer.stop_ids,
                seed=request.seed,
            )
            for request in playable
        ]
        handles = iter(engine.submit(prompt, sampling) if sampling else [])
        for request, environment in group:
            episode = _Running(request, environment, prompt, engine.weight_version, now)
            if settings.run_window is not None:
                episode.repetition = RepetitionStop(settings.run_window, settings.run_threshold)
            if isinstance(environment, ToolFailure):
                episode.end, episode.failure, episode.finished_at = EpisodeEnd.TOOL_FAILURE, environment, now
                running.append((None, episode))
            else:
                running.append((next(handles), episode))
    return running


async def _end_turn(
    engine: Engine, renderer: Renderer, handle: int, episode: _Running, why: StopReason, settings: RolloutSettings
) -> None:
    """Read the finished turn; run its tools and let the sequence go on, or end the episode."""
    episode.turns += 1
    ids = episode.ids[episode.turn_start :]
    episode.segments.append(Segment("turn", episode.turn_start, len(episode.ids)))
    parsed = renderer.parse(ids)
    episode.reasoning_tokens += parsed.reasoning_tokens
    message = parsed.message
    if why is not StopReason.STOP or parsed.malformed is not None:
        if episode.end is None:
            episode.end = EpisodeEnd.LENGTH if why is not StopReason.STOP else EpisodeEnd.MALFORMED
        episode.messages.append(Message(role="assistant", content=None, thinking=message.thinking))
        return
    episode.messages.append(message)
    if not message.tool_calls:
        episode.end = EpisodeEnd.ANSWER
        return
    if episode.turns >= settings.max_turns:
        episode.end = EpisodeEnd.TURNS
        return
    if sum(episode.mask) >= settings.max_tokens:
        episode.end = EpisodeEnd.LENGTH
        return
    assert not isinstance(episode.environment, ToolFailure)
    try:
        results = await episode.environment.call_all(message.tool_calls)
    except ToolFailure as failure:
        episode.end, episode.failure = EpisodeEnd.TOOL_FAILURE, failure
        return
    episode.messages += results
    appended = renderer.tool_results(results)
    if len(episode.prompt) + len(episode.ids) + len(appended) >= engine.context:
        episode.end = EpisodeEnd.LENGTH
        return
    episode.append_result(appended)
    engine.extend(handle, appended)


async def _judged(episode: _Running, runtime: DomainRuntime) -> Rollout:
    assert episode.end is not None
    played = None
    if not isinstance(episode.environment, ToolFailure):
        finished = episode.end in (EpisodeEnd.ANSWER, EpisodeEnd.MALFORMED)
        played = Episode(episode.request.task, tuple(episode.messages), finished, episode.environment)
        await episode.environment.close()
    if episode.failure is not None or played is None:
        verdict = runtime.unjudged(episode.failure or ToolFailure("the environment was not opened"))
    else:
        verdict = await runtime.judge(played)
    trajectory = Trajectory(
        task_id=episode.request.task.task_id,
        prompt=tuple(episode.prompt),
        ids=tuple(episode.ids),
        logprobs=tuple(episode.logprobs),
        mask=tuple(episode.mask),
        segments=tuple(episode.segments),
        end=episode.end,
        weight_version=episode.weight_version,
        reasoning_tokens=episode.reasoning_tokens,
    )
    return Rollout(trajectory, played, verdict, episode.finished_at - episode.started)
