"""``make demo``: train the invoice domain, serve it, and ask it one case that it never saw."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.catalog import Catalog
from infra.errors import EXIT_FAILED_CHECK, CheckFailed, SenmonError
from infra.inference.messages import Message, ToolCall
from infra.settings import Settings
from pipelines.output import console, set_up_logging, table
from pipelines.runner import Interrupted, RunRequest, run_domain
from pipelines.spec import Domain, load_domain
from pipelines.stages import make_runtime

if TYPE_CHECKING:
    from openai import OpenAI
    from rich.console import Console

    from data_contracts.records import Task
    from domain_rewards.runtime import DomainRuntime

DOMAIN = "invoice_approval"
START_SECONDS = 180.0
STOP_SECONDS = 60.0
MAX_TURNS = 8


@dataclass(frozen=True)
class Turn:
    """One reply of the served model. Ratio and latency are the gateway's own; None where it does not know."""

    message: Message
    thinking_token_ratio: float | None
    latency_ms: float | None


@dataclass(frozen=True)
class Conversation:
    """A case worked through: the turns, the tools' results between them, and the verifiers' reward."""

    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]
    reward: float | None


async def work_through(client: OpenAI, model: str, task: Task, runtime: DomainRuntime) -> Conversation:
    """Ask the served model until it answers; its tool calls are run here, on the client's side.

    Args:
        client: an OpenAI client on the gateway.
        model: what to ask for, such as the domain's name.
        task: the case.
        runtime: the domain's tools and verifiers.
    """
    from domain_rewards.episode import Episode

    environment = await runtime.open(task)
    asked: list[Any] = [{"role": m.role, "content": m.content} for m in environment.messages(task)]
    tools: list[Any] = [
        {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}}
        for t in environment.tools()
    ]
    turns: list[Turn] = []
    messages: list[Message] = []
    finished = False
    while not finished and len(turns) < MAX_TURNS:
        reply = await asyncio.to_thread(
            client.chat.completions.create, model=model, messages=asked, tools=tools, temperature=0
        )
        choice = reply.choices[0]
        asked.append(choice.message.model_dump(exclude_none=True))
        turn = read_turn(reply.model_dump())
        turns.append(turn)
        messages.append(turn.message)
        finished = choice.finish_reason == "stop"
        if choice.finish_reason != "tool_calls":
            break
        for result in await environment.call_all(turn.message.tool_calls):
            messages.append(result)
            asked.append({"role": "tool", "tool_call_id": result.tool_call_id, "content": result.content})
    verdict = await runtime.judge(Episode(task, tuple(messages), finished, environment))
    await environment.close()
    return Conversation(tuple(turns), tuple(messages), verdict.reward)


def read_turn(reply: dict[str, Any]) -> Turn:
    """A chat completion (as JSON) as a message with its figures."""
    said = reply["choices"][0]["message"]
    calls = tuple(
        ToolCall(name=c["function"]["name"], arguments=c["function"]["arguments"], call_id=c["id"])
        for c in said.get("tool_calls") or ()
    )
    message = Message(role="assistant", content=said["content"], thinking=said.get("reasoning"), tool_calls=calls)
    metrics = reply.get("metrics") or {}
    return Turn(message, metrics.get("thinking_token_ratio"), metrics.get("e2e_latency_ms"))


def held_out_case(settings: Settings, domain: Domain, run_id: str) -> tuple[Task, DomainRuntime]:
    """The first case of the run's test split, and the domain's tools."""
    from data_contracts.records import Snapshot
    from data_contracts.snapshot import load_tasks

    with Catalog.open(settings.catalog) as catalog:
        row = catalog.stage_result(run_id, "snapshot")
        if row is None:
            raise CheckFailed("the run has no snapshot", where=f"run {run_id}", fix=f"senmon run {domain.argument}")
        snapshot = catalog.get(Snapshot, row.output["snapshot"])
    task = load_tasks(Path(row.output["folder"]), snapshot, "test")[0]
    return task, make_runtime(settings, domain)


@contextmanager
def gateway(domain: str) -> Iterator[str]:
    """``senmon serve`` in a process of its own on a free port; gives the base URL once it is ready."""
    command = [sys.executable, "-m", "pipelines.cli", "serve", domain, "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise CheckFailed("the gateway did not start", where="senmon serve", fix="see its messages above")
        url = str(json.loads(line)["url"])
        _wait_until_ready(url, process)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(url: str, process: subprocess.Popen[str]) -> None:
    import httpx

    deadline = time.monotonic() + START_SECONDS
    problem = "no answer"
    while time.monotonic() < deadline and process.poll() is None:
        try:
            reply = httpx.get(url.removesuffix("/v1") + "/readyz", timeout=5)
            if reply.status_code == 200:
                return
            problem = reply.text
        except httpx.HTTPError as error:
            problem = str(error)
        time.sleep(0.2)
    raise CheckFailed(f"the gateway is not ready: {problem}", where=url, fix="see its messages above")


def show(console: Console, task: Task, conversation: Conversation) -> None:
    """Print a conversation: thinking, tool calls and results, answer, and the gateway's figures."""
    turns = iter(conversation.turns)
    console.print("case     ", task.prompt, style="bold", markup=False, highlight=False)
    for message in conversation.messages:
        if message.role == "tool":
            console.print("result   ", message.content, style="cyan", markup=False, highlight=False)
            continue
        turn = next(turns)
        if message.thinking:
            console.print("thinking ", message.thinking, style="dim", markup=False, highlight=False)
        for call in message.tool_calls:
            console.print("call     ", f"{call.name}({call.arguments})", style="cyan", markup=False, highlight=False)
        if message.content:
            console.print("answer   ", message.content, style="bold green", markup=False, highlight=False)
        ratio = "unknown" if turn.thinking_token_ratio is None else f"{turn.thinking_token_ratio:.2f}"
        latency = "unknown" if turn.latency_ms is None else f"{turn.latency_ms:.0f} ms"
        console.print(f"          thinking ratio {ratio}, latency {latency}", style="dim", highlight=False)
    console.print(f"reward    {conversation.reward}", highlight=False)


def main() -> int:
    """Run the demo; the exit code of the first thing that fails, else 0."""
    from openai import OpenAI

    set_up_logging()
    screen = console()
    try:
        settings, domain = Settings(), load_domain(DOMAIN)
        summary = run_domain(settings, RunRequest(DOMAIN, promote=True))
        table(screen, ("figure", "value"), list(summary.items()))
        task, runtime = held_out_case(settings, domain, summary["run_id"])
        with gateway(DOMAIN) as url:
            client = OpenAI(base_url=url, api_key="unused", max_retries=0, timeout=60)
            conversation = asyncio.run(work_through(client, DOMAIN, task, runtime))
        show(screen, task, conversation)
    except Interrupted as stop:
        print(
            f"interrupted; continue with: senmon run {DOMAIN} --promote --resume  (run {stop.run_id})", file=sys.stderr
        )
        return 130
    except SenmonError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0 if conversation.messages and conversation.messages[-1].content else EXIT_FAILED_CHECK


if __name__ == "__main__":
    sys.exit(main())
