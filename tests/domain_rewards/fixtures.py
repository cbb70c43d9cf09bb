"""A small environment and episodes for the tests of this room."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

from pydantic import BaseModel, Field

from data_contracts.records import Task
from domain_rewards.environments.base import ToolEnvironment, ToolError, ToolFailure, tool
from domain_rewards.episode import Episode
from infra.inference.messages import Message, ToolCall


class Ticket(BaseModel):
    id: int
    note: str | None = None


class Desk(ToolEnvironment):
    """Counts how often the body of a tool ran."""

    def __init__(self, task: Task, options: dict[str, object]) -> None:
        super().__init__(task, options)
        self.ran = 0

    @tool
    def get_ticket(self, id: int, urgent: bool = False) -> Ticket:
        """Read a ticket."""
        self.ran += 1
        return Ticket(id=id)

    @tool
    async def search(self, words: list[str], limit: Annotated[int, Field(ge=1, le=9)] = 3) -> list[str]:
        """Search tickets."""
        self.ran += 1
        await asyncio.sleep(0)
        return words[:limit]

    @tool
    def refuse(self) -> str:
        """Always says no."""
        raise ToolError("closed")

    @tool
    def crash(self) -> None:
        """A tool with a broken back end."""
        raise ConnectionError("database is down")

    @tool(isolate=True, timeout_s=0.05)
    def block(self, seconds: float) -> str:
        """Blocks its thread."""
        time.sleep(seconds)
        return "done"

    @tool(timeout_s=0.05)
    async def wait(self, seconds: float) -> str:
        """Waits."""
        await asyncio.sleep(seconds)
        return "done"

    @tool
    async def own_timeout(self) -> None:
        """Its own back end times out, long before the limit of the tool."""
        raise TimeoutError("database did not answer")

    @tool
    def gives_up(self) -> None:
        """Knows itself that its machinery failed."""
        raise ToolFailure("license server is gone", where="rack 3", fix="restart it")

    @tool
    def raw(self, size: int) -> bytes:
        """Bytes that are not UTF-8, then many letters."""
        return b"ok \xff\xfe\n" + b"x" * size

    @tool
    def ratio(self) -> dict[str, float]:
        """A result that JSON cannot say."""
        return {"ratio": float("nan")}


def make_task(task_id: str = "t1", **reference: object) -> Task:
    return Task(task_id=task_id, prompt="question", reference=dict(reference), group_key="g")


def desk() -> Desk:
    return Desk(make_task(), {})


def call(name: str, arguments: str = "{}", call_id: str = "") -> ToolCall:
    return ToolCall(name=name, arguments=arguments, call_id=call_id)


def episode(*messages: Message, finished: bool = True) -> Episode:
    return Episode(make_task(), messages, finished, desk())


def said(content: str, thinking: str | None = None) -> Message:
    return Message(role="assistant", content=content, thinking=thinking)
