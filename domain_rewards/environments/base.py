"""Environments: what an agent can do in one episode, and what comes back."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic_core import to_json

from data_contracts.records import Task
from domain_rewards.deadline import TimeUp, on_main_thread, within
from domain_rewards.environments.threads import in_thread
from domain_rewards.environments.tool import Tool, ToolError, collect, tool
from infra.errors import CheckFailed, UsageError
from infra.inference.messages import Message, ToolCall, ToolSchema

__all__ = ["Tool", "ToolEnvironment", "ToolError", "ToolFailure", "tool"]


class ToolFailure(CheckFailed):
    """The machinery behind a tool failed (database down, bug in the tool): the episode cannot be judged."""


class ToolEnvironment:
    """One episode of one task. Subclasses add ``@tool`` methods; state lives on the instance.

    Args:
        task: the task at hand, hidden reference included.
        options: the domain's ``environment.options``.
    """

    max_result_chars: ClassVar[int] = 8192
    """Longer tool results are cut, with a marker that says how many characters were dropped."""
    _tools: ClassVar[Mapping[str, Tool[..., Any]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._tools = collect(cls.__mro__)
        taken = sorted(cls._tools.keys() & vars(ToolEnvironment).keys())
        if taken:
            raise UsageError(
                f"a tool of {cls.__qualname__} has the name of a method of every environment: {', '.join(taken)}",
                where=f"{cls.__module__}.{cls.__qualname__}",
                fix="rename the tool",
            )

    def __init__(self, task: Task, options: Mapping[str, Any]) -> None:
        self.task = task
        self.options = options
        self.errors: Counter[str] = Counter()
        """How often each kind of error was answered to the model (``unknown_tool``, ``missing_argument``, …)."""

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Refuse options that no episode could run with, once, before anything starts.

        Raises:
            UsageError: an option is missing or wrong.
        """

    async def setup(self) -> None:
        """Prepare the episode before the first turn; what it raises makes the episode unjudgeable."""

    async def close(self) -> None:
        """Release what :meth:`setup` took."""

    @classmethod
    def tools(cls) -> tuple[ToolSchema, ...]:
        """Schemas of all tools, in the order in which the class defines them."""
        return tuple(each.schema for each in cls._tools.values())

    @classmethod
    def messages(cls, task: Task) -> tuple[Message, ...]:
        """The conversation's beginning: one user message with the task's prompt unless a subclass adds to it."""
        return (Message(role="user", content=task.prompt),)

    async def call(self, call: ToolCall) -> Message:
        """Answer one tool call with one tool message whose content is compact JSON.

        The model's mistakes are answered, never raised: ``{"error": CODE}`` with ``unknown_tool``, the codes of
        :meth:`Tool.read`, whatever code the tool refuses with (:class:`ToolError`), or ``timeout``.

        Raises:
            ToolFailure: the tool itself failed; the episode gets no reward instead of a wrong one.
        """
        try:
            content = _text(await self._run(call), self.max_result_chars)
        except ToolError as refused:
            self.errors[refused.code.partition(":")[0]] += 1
            content = to_json({"error": refused.code}).decode()
        except (ToolFailure, KeyboardInterrupt, asyncio.CancelledError):
            raise
        except BaseException as error:  # a tool that exits must not end the run
            raise ToolFailure(
                f"tool {call.name} failed: {type(error).__name__}: {error}",
                where=f"task {self.task.task_id}, {type(self).__name__}.{call.name}",
                fix="repair what the tool depends on; raise ToolError(code) for what the model did wrong",
            ) from error
        return Message(role="tool", name=call.name, content=content, tool_call_id=call.call_id)

    async def call_all(self, calls: Sequence[ToolCall]) -> list[Message]:
        """Answer the calls of one turn, one after the other: as many messages as calls, each with its call's id."""
        return [await self.call(call) for call in calls]

    async def _run(self, call: ToolCall) -> Any:
        chosen = self._tools.get(call.name)
        if chosen is None:
            raise ToolError("unknown_tool")
        arguments = chosen.read(call.arguments)
        if not chosen.is_async and not chosen.isolate and on_main_thread():
            try:
                return within(chosen.timeout_s, lambda: chosen.function(self, **arguments))
            except TimeUp:
                raise ToolError("timeout") from None
        try:
            async with asyncio.timeout(chosen.timeout_s) as deadline:
                if chosen.is_async:
                    return await chosen.function(self, **arguments)
                return await in_thread(lambda: chosen.function(self, **arguments))
        except TimeoutError:
            if deadline.expired():  # otherwise it is the tool's own, for example of its database
                raise ToolError("timeout") from None
            raise


def _text(result: Any, limit: int) -> str:
    if isinstance(result, bytes):
        result = result.decode(errors="replace")
    text = to_json(result, inf_nan_mode="null").decode()
    if len(text) > limit:
        return f"{text[:limit]}…[{len(text) - limit} characters dropped]"
    return text
