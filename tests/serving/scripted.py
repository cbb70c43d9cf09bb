"""Engines and sources that do what a test says, and a gateway on a real loopback socket."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import uvicorn
from fastapi import FastAPI

from infra.compute.tokenizer import train_tokenizer
from infra.inference.engine import SamplingParams, StopReason, TokenEvent
from infra.inference.messages import Message, ToolCall
from infra.inference.renderers.tiny import TinyRenderer
from serving.app import create_app
from serving.models import ServedModel
from serving.options import GatewayOptions
from serving.server import base_url, bind

Script = Callable[[Sequence[int]], Sequence[int]]


@functools.cache
def renderer() -> TinyRenderer:
    """A renderer over a byte-level tokenizer without merges: every byte is a token."""
    return TinyRenderer(train_tokenizer(["a"], 300))


def said(thinking: str | None = None, content: str | None = None, call: tuple[str, str] | None = None) -> list[int]:
    """The ids of one assistant turn, its end marker included."""
    calls = () if call is None else (ToolCall(name=call[0], arguments=call[1]),)
    message = Message(role="assistant", thinking=thinking, content=content, tool_calls=calls)
    return list(renderer().demonstration((), (message,), ()).ids)


def text_ids(text: str) -> list[int]:
    return list(renderer().tokenizer.encode(text, add_special_tokens=False))


@dataclass
class ScriptedEngine:
    """Says what ``script(prompt)`` returns, one token a step; counts what it was asked to do."""

    script: Script
    step_s: float = 0.0
    before_step: Callable[[], object] = lambda: None
    weight_version: int = 0
    context: int = 256
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    sampling: list[SamplingParams] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    steps: int = 0
    produced: int = 0
    _open: dict[int, list[int]] = field(default_factory=dict)
    _sampled: dict[int, int] = field(default_factory=dict)

    @property
    def open(self) -> int:
        return len(self._open)

    def submit(self, prompt: Sequence[int], sampling: Sequence[SamplingParams]) -> list[int]:
        if not prompt:
            raise ValueError("an empty prompt")
        handles = []
        for params in sampling:
            handle = len(self.sampling)
            self.prompts.append(tuple(prompt))
            self.sampling.append(params)
            self._open[handle] = list(self.script(prompt))
            self._sampled[handle] = 0
            handles.append(handle)
        return handles

    def extend(self, sequence: int, tokens: Sequence[int]) -> None:
        raise AssertionError("the gateway has no stopped sequences to extend")

    def step(self) -> list[TokenEvent]:
        self.before_step()
        time.sleep(self.step_s)
        self.steps += 1
        events = []
        for handle, rest in self._open.items():
            token = rest.pop(0)
            self._sampled[handle] += 1
            self.produced += 1
            params = self.sampling[handle]
            reason = StopReason.STOP if token in params.stop_ids else None
            if reason is None and self._sampled[handle] >= params.max_tokens:
                reason = StopReason.LENGTH
            events.append(TokenEvent(handle, token, -1.0, reason))
        return events

    def release(self, sequence: int) -> None:
        if self._open.pop(sequence, None) is not None:
            self.released.append(sequence)


@dataclass
class ScriptedSource:
    """A registry in memory: stages, and engines per version."""

    engines: dict[tuple[str, int], ScriptedEngine] = field(default_factory=dict)
    stages: dict[tuple[str, str], int] = field(default_factory=dict)
    loads: list[tuple[str, int]] = field(default_factory=list)
    outage: bool = False
    broken: set[tuple[str, int]] = field(default_factory=set)

    def domains(self) -> list[str]:
        return sorted({domain for domain, _ in self.engines})

    def resolve(self, domain: str, target: str) -> int | None:
        if self.outage:
            raise ConnectionError("registry is down")
        if target.isdecimal():
            return int(target) if (domain, int(target)) in self.engines else None
        return self.stages.get((domain, target))

    def load(self, domain: str, version: int) -> ServedModel:
        self.loads.append((domain, version))
        if (domain, version) in self.broken:
            raise OSError("weights are damaged")
        return ServedModel(domain, version, self.engines[domain, version], renderer())


def one_model(engine: ScriptedEngine) -> ScriptedSource:
    """A source with version 1 of ``demo`` in production."""
    return ScriptedSource({("demo", 1): engine}, {("demo", "production"): 1})


@dataclass(frozen=True)
class Gateway:
    """A gateway on a loopback port."""

    url: str
    http: httpx.Client
    client: openai.OpenAI

    def chat(self, **body: Any) -> httpx.Response:
        body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]} | body
        return self.http.post("/v1/chat/completions", json=body)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of all samples with these labels."""
        total = 0.0
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        for line in self.http.get("/metrics").text.splitlines():
            if line.split("{")[0] == name and all(item in line for item in wanted):
                total += float(line.rsplit(" ", 1)[1])
        return total


@contextlib.contextmanager
def gateway(source: Any, options: GatewayOptions | None = None, **more: Any) -> Iterator[Gateway]:
    """Serve ``source``; ready when the block begins."""
    with served(create_app(source, options=options or GatewayOptions(poll_s=0.05), **more)) as running:
        wait_until(lambda: running.http.get("/readyz").status_code == 200, seconds=20)
        yield running


@contextlib.contextmanager
def served(app: FastAPI) -> Iterator[Gateway]:
    """Run an application under uvicorn in a thread."""
    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    url = base_url(listener)
    try:
        with (
            httpx.Client(base_url=url.removesuffix("/v1"), timeout=20) as http,
            openai.OpenAI(base_url=url, api_key="unused", max_retries=0, timeout=20) as client,
        ):
            yield Gateway(url, http, client)
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
    assert not thread.is_alive()


def wait_until(true: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
