"""A turn in OpenAI's words: one ``chat.completion`` or a row of ``chat.completion.chunk``."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

from serving.models import ServedModel
from serving.options import GatewayOptions
from serving.request import ChatRequest
from serving.running import TurnResult
from serving.turn import TurnDelta, wire_delta


class Reply:
    """Builds the reply to one request; whole and streamed replies carry the same text and figures."""

    def __init__(self, chat: ChatRequest, served: ServedModel, options: GatewayOptions) -> None:
        self._options = options
        self._usage = chat.include_usage
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(16)}",
            "created": int(time.time()),
            "model": chat.model,
            "model_version": f"{served.domain}:{served.version}",
        }

    def whole(self, result: TurnResult) -> dict[str, Any]:
        """The ``chat.completion`` object."""
        turn = result.turn
        answered = result.finish_reason == "stop"
        message: dict[str, Any] = {
            "role": "assistant",
            "content": turn.content if turn.content is not None or not answered else "",
            "reasoning": turn.reasoning,
        }
        if self._options.reasoning_content:
            message["reasoning_content"] = turn.reasoning
        if turn.has_calls:
            message["tool_calls"] = turn.tool_calls()
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": result.finish_reason,
            "code": result.code,
            "logprobs": None,
        }
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [choice],
            "usage": usage(result),
            "metrics": result.metrics.payload(),
        }

    def opening(self) -> str:
        """The first chunk: the role alone."""
        return self._chunk([self._choice({"role": "assistant"})])

    def delta(self, delta: TurnDelta) -> str:
        """A chunk with a piece of the turn."""
        return self._chunk([self._choice(wire_delta(delta, reasoning_content=self._options.reasoning_content))])

    def closing(self, result: TurnResult) -> list[str]:
        """The chunk with the finish reason; then, if asked for, the one with the usage. The last has the metrics."""
        choice = self._choice({}, result.finish_reason) | {"code": result.code}
        metrics = {"metrics": result.metrics.payload()}
        if not self._usage:
            return [self._chunk([choice], metrics)]
        return [self._chunk([choice]), self._chunk([], metrics | {"usage": usage(result)})]

    def _choice(self, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        return {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}

    def _chunk(self, choices: list[dict[str, Any]], more: dict[str, Any] | None = None) -> str:
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        if self._usage:
            chunk["usage"] = None
        # ASCII only: some clients split lines at U+2028 and its kin.
        return json.dumps(chunk | (more or {}), ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def usage(result: TurnResult) -> dict[str, Any]:
    """Token counts; ``completion_tokens`` are all sampled ids, markers included."""
    return {
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": result.completion_tokens,
        "total_tokens": result.prompt_tokens + result.completion_tokens,
        "completion_tokens_details": {"reasoning_tokens": result.reasoning_tokens},
    }
