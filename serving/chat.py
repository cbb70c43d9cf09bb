"""``POST /v1/chat/completions``: from the request's bytes to a reply, whole or streamed."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from sse_starlette import EventSourceResponse
from starlette.types import Receive, Scope, Send

from infra.errors import UsageError
from infra.hashing import canonical_json
from infra.inference.engine import SamplingParams
from infra.inference.messages import Message
from infra.inference.renderers.base import Renderer
from serving.envelope import request_id
from serving.errors import ApiError, bad_request, internal_error
from serving.models import ModelRef
from serving.observe import GatewayMetrics, Labels
from serving.options import GatewayOptions
from serving.pool import Lease, ModelPool
from serving.reply import Reply
from serving.request import ChatRequest, conversation, parse_chat_request, tool_schemas
from serving.running import RunningTurn
from serving.worker import Clock, ThinkingCap

logger = logging.getLogger(__name__)
T = TypeVar("T")

ROUTE = "/v1/chat/completions"
CLIENT_CLOSED = 499
CHARACTERS_PER_TOKEN = 64
"""Far above what any tokenizer reaches on average: more characters than this per token of context cannot fit."""
_RENDERING = ThreadPoolExecutor(max_workers=1, thread_name_prefix="render")
"""Prompts are tokenised off the event loop, one after the other: a tokenizer has settings that calls change."""


class ChatService:
    """Answers chat requests from the models of a pool."""

    def __init__(
        self, pool: ModelPool, metrics: GatewayMetrics, options: GatewayOptions, clock: Clock = time.monotonic
    ) -> None:
        self._pool = pool
        self._metrics = metrics
        self._options = options
        self._clock = clock

    async def handle(self, request: Request) -> Response:
        """One request; every refusal is an :class:`~serving.errors.ApiError` raised before the reply begins."""
        arrived = self._clock()
        labels = Labels("", "", ROUTE)
        has_budget = "x-latency-budget-ms" in request.headers
        try:
            chat = parse_chat_request(await _body(request, self._options.max_body_bytes))
            budget = latency_budget(request)
            lease = await self._pool.lease(ModelRef.parse(chat.model))
            labels = Labels(lease.served.domain, str(lease.served.version), ROUTE)
            try:
                turn = await self._open(chat, lease, labels, arrived, budget, request_id(request.scope))
            except BaseException:
                lease.release()
                raise
        except ApiError as error:
            self._metrics.refused(labels, error.code, latency_budget=has_budget)
            raise
        reply = Reply(chat, lease.served, self._options)
        if chat.stream:
            return await self._stream(request, turn, reply)
        return await self._whole(request, turn, reply)

    async def _open(
        self, chat: ChatRequest, lease: Lease, labels: Labels, arrived: float, budget: float | None, request_id: str
    ) -> RunningTurn:
        served = lease.served
        cap = None if chat.thinking_cap is None else ThinkingCap(served.renderer, chat.thinking_cap)
        check_size(chat, served.engine.context)
        prompt = await asyncio.get_running_loop().run_in_executor(_RENDERING, _prompt, chat, served.renderer)
        sampling = _sampling(chat, self._max_tokens(chat, len(prompt), served.engine.context), served.renderer.stop_ids)
        return RunningTurn(
            lease=lease,
            generation=lease.worker.submit(prompt, sampling, cap),
            metrics=self._metrics,
            labels=labels,
            request_id=request_id,
            arrived=arrived,
            latency_budget=budget,
            clock=self._clock,
        )

    def _max_tokens(self, chat: ChatRequest, prompt_tokens: int, context: int) -> int:
        room = context - prompt_tokens
        wanted = chat.completion_limit
        if room < 1 or (wanted is not None and wanted > room):
            raise bad_request(
                f"The context holds {context} tokens; the prompt has {prompt_tokens}"
                + (f" and {wanted} more were asked for." if wanted is not None else "."),
                "messages" if wanted is None else "max_completion_tokens",
                "context_length_exceeded",
            )
        return min(room, self._options.default_max_tokens) if wanted is None else wanted

    async def _whole(self, request: Request, turn: RunningTurn, reply: Reply) -> Response:
        async def collect() -> JSONResponse:
            async for _ in turn.deltas():
                pass
            return JSONResponse(reply.whole(turn.result()))

        return await _unless_client_leaves(request, turn, collect)

    async def _stream(self, request: Request, turn: RunningTurn, reply: Reply) -> Response:
        async def begin() -> Response:
            await turn.begin()
            return TurnStream(turn, reply, self._options)

        return await _unless_client_leaves(request, turn, begin, keep_open=True)


class TurnStream(EventSourceResponse):
    """A turn as server-sent events; however the response ends, the turn's slot is freed."""

    def __init__(self, turn: RunningTurn, reply: Reply, options: GatewayOptions) -> None:
        super().__init__(_events(turn, reply), sep="\n", ping=options.ping_s, shutdown_grace_period=options.drain_s)
        self._turn = turn

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._turn.close("client_closed")


async def _events(turn: RunningTurn, reply: Reply) -> AsyncIterator[dict[str, str]]:
    yield {"data": reply.opening()}
    try:
        async for delta in turn.deltas():
            yield {"data": reply.delta(delta)}
        for chunk in reply.closing(turn.result()):
            yield {"data": chunk}
    except ApiError as error:
        yield {"data": canonical_json(error.body())}
        return
    except Exception:  # the reply has begun: only the stream itself can still say so
        logger.exception("a stream failed")
        yield {"data": canonical_json(internal_error().body())}
        return
    yield {"data": "[DONE]"}


async def _unless_client_leaves(
    request: Request, turn: RunningTurn, work: Callable[[], Coroutine[Any, Any, Response]], *, keep_open: bool = False
) -> Response:
    """Do ``work`` while watching the connection; a client that leaves frees its slot at once.

    With ``keep_open`` the turn goes on after ``work`` has succeeded (the stream closes it).
    """
    leaving = asyncio.create_task(_disconnected(request))
    working = asyncio.create_task(work())
    done = False
    try:
        await asyncio.wait({leaving, working}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return Response(status_code=CLIENT_CLOSED)
        response = working.result()
        done = True
        return response
    except Exception as error:
        turn.close(error.code if isinstance(error, ApiError) else "internal_error")
        raise
    finally:
        leaving.cancel()
        working.cancel()
        if not (keep_open and done):
            turn.close("client_closed")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request, limit: int) -> bytes:
    """The JSON body.

    Raises:
        ApiError: 400 for another content type (which also stops cross-site form posts), 413 when too large.
    """
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise bad_request("The content type must be application/json.", None, "invalid_content_type")
    too_large = ApiError(413, f"The body is larger than {limit} bytes.", code="request_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise too_large
    return bytes(body)


def latency_budget(request: Request) -> float | None:
    """``x-latency-budget-ms`` in seconds, or None.

    Raises:
        ApiError: 400 when it is not a positive number.
    """
    text = request.headers.get("x-latency-budget-ms")
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise bad_request("'x-latency-budget-ms' must be a positive number.", "x-latency-budget-ms")
    return value / 1e3


def check_size(chat: ChatRequest, context: int) -> None:
    """Refuse what cannot fit before it is tokenised, whose time grows faster than its length.

    Raises:
        ApiError: 400 for more than ``CHARACTERS_PER_TOKEN`` characters per token of the context.
    """
    characters = sum(len(text) for message in conversation(chat) for text in _texts(message))
    if characters > context * CHARACTERS_PER_TOKEN:
        raise bad_request(
            f"The context holds {context} tokens; the messages have {characters} characters.",
            "messages",
            "context_length_exceeded",
        )


def _texts(message: Message) -> Iterator[str]:
    yield message.content or ""
    yield message.thinking or ""
    for call in message.tool_calls:
        yield call.name
        yield call.arguments


def _prompt(chat: ChatRequest, renderer: Renderer) -> list[int]:
    messages, tools = conversation(chat), tool_schemas(chat)
    try:
        return renderer.prompt(messages, tools)
    except UsageError as error:
        raise bad_request(f"The model's template refuses this conversation: {error.what}.", "messages") from error


def _sampling(chat: ChatRequest, max_tokens: int, stop_ids: frozenset[int]) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if chat.temperature is None else chat.temperature,
        top_p=1.0 if chat.top_p is None else chat.top_p,
        top_k=max(0, chat.top_k or 0),
        min_p=chat.min_p or 0.0,
        stop_ids=stop_ids,
        seed=secrets.randbits(63) if chat.seed is None else chat.seed & (2**63 - 1),
    )
