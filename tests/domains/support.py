"""Replaying demonstrations through an environment."""

from __future__ import annotations

from data_contracts.records import Demonstration, Task
from domain_rewards.environments.base import ToolEnvironment
from domain_rewards.episode import Episode
from domain_rewards.runtime import DomainRuntime
from infra.inference.messages import Message


async def replay(runtime: DomainRuntime, task: Task, demonstration: Demonstration) -> Episode:
    """Let the demonstration's assistant messages meet the real tools; the results are the environment's own."""
    environment: ToolEnvironment = await runtime.open(task)
    messages: list[Message] = []
    for message in demonstration.messages:
        if message.role == "assistant":
            messages += [message, *await environment.call_all(message.tool_calls)]
    return Episode(task, tuple(messages), True, environment)
