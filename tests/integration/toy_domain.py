"""A whole domain folder small enough to run in seconds: double a number, with a tool or in the head."""

from __future__ import annotations

import json
from pathlib import Path

DOMAIN = """\
name: doubling
model:
  {preset: tiny-moe, hidden_size: 32, layers: 2, heads: 2, kv_heads: 1, head_dim: 16, expert_size: 32,
   max_positions: 96}
data:
  tasks: {table: questions, id: task_id, prompt: "double {number}", reference: [answer]}
  demonstrations: {table: demonstrations, task: task_id, source: source, messages: messages}
  splits: {dev: 8, test: 8}
environment: {class: "environment.py:Doubling"}
verifiers: ["verifiers.py:odd_length"]
sft: {max_steps: 6, batch_size: 4, checkpoint_every: 1, warmup_steps: 1}
rl:
  {steps: 12, groups: 2, group_size: 4, minibatch: 8, microbatch: 8, epochs: 1, checkpoint_every: 1, eval_every: 0,
   max_tokens: 16, max_turns: 3, learning_rate: 1.0e-3}
evaluation: {max_tokens: 16, max_turns: 3}
gates:
  cold_start: [{metric: sft.dev_success, min: 0}]
  promotion: [{metric: rl.heldout_success, min: 0}]
"""

CONTRACT = """\
apiVersion: v3.1.0
kind: DataContract
id: doubling
version: 1.0.0
status: active
servers:
  - {server: files, type: local, path: "data/{table}.jsonl", format: jsonl}
schema:
  - name: questions
    logicalType: object
    properties:
      - {name: task_id, logicalType: string, primaryKey: true, logicalTypeOptions: {pattern: "^t[0-9]+$"}}
      - {name: number, logicalType: integer, required: true, logicalTypeOptions: {minimum: 0, maximum: 999}}
      - {name: answer, logicalType: string, required: true}
  - name: demonstrations
    logicalType: object
    properties:
      - {name: task_id, logicalType: string, required: true}
      - {name: source, logicalType: string, required: true}
      - {name: messages, logicalType: array, required: true, items: {logicalType: object}}
"""

ENVIRONMENT = '''\
from domain_rewards.environments.base import ToolEnvironment, tool


class Doubling(ToolEnvironment):
    """One tool."""

    @tool
    def double(self, number: int) -> dict[str, int]:
        """Double a number."""
        return {"value": 2 * number}
'''

VERIFIERS = '''\
from domain_rewards.episode import Episode
from domain_rewards.verifiers.base import verifier


@verifier("odd_length")
def odd_length(episode: Episode) -> float:
    """A reward that even an untrained model gets about half of the time, so that there is something to learn from."""
    said = "".join(f"{m.thinking or ''}{m.content or ''}" for m in episode.messages if m.role == "assistant")
    return float(len(said) % 2)
'''


def write_toy_domain(folder: Path, tasks: int = 48) -> Path:
    """Make the folder with its data and return it."""
    (folder / "data").mkdir(parents=True)
    for name, text in {
        "domain.yaml": DOMAIN,
        "contract.yaml": CONTRACT,
        "environment.py": ENVIRONMENT,
        "verifiers.py": VERIFIERS,
    }.items():
        (folder / name).write_text(text)
    questions = [{"task_id": f"t{n}", "number": n, "answer": str(2 * n)} for n in range(tasks)]
    demonstrations = []
    for question in questions:
        call = {"name": "double", "arguments": json.dumps({"number": question["number"]}, separators=(",", ":"))}
        demonstrations.append(
            {
                "task_id": question["task_id"],
                "source": "tool",
                "messages": [
                    {"role": "assistant", "thinking": "use the tool", "tool_calls": [call]},
                    {"role": "tool", "name": "double", "content": f'{{"value":{question["answer"]}}}'},
                    {"role": "assistant", "content": question["answer"]},
                ],
            }
        )
    write_table(folder, "questions", questions)
    write_table(folder, "demonstrations", demonstrations)
    return folder


def write_table(folder: Path, name: str, rows: list[dict[str, object]]) -> None:
    """Replace one table's file."""
    (folder / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_table(folder: Path, name: str) -> list[dict[str, object]]:
    """One table's rows."""
    return [json.loads(line) for line in (folder / "data" / f"{name}.jsonl").read_text().splitlines()]
