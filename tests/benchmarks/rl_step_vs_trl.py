"""One GSPO step, rollout and update: Senmon against TRL's ``GRPOTrainer``, interleaved in one process.

Same model, prompts, completion lengths, threads (one) and settings; medians over the repeats after one warm-up.
``ratio`` is TRL's seconds divided by ours. TRL runs GptOss with eager attention, the only one that transformers offers
for it on a CPU. Peak memory is what two steps need beyond the loaded model, each side in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks._policy_step import Ours, Theirs, Workload

WORKLOADS = [Workload(prompt, group) for prompt in (64, 256, 1024) for group in (8, 16)] + [Workload(1024, 8, True)]


def measure(workload: Workload, repeats: int) -> list[dict[str, Any]]:
    """Rows for seconds per step and peak memory of one workload."""
    ours = Ours(workload)
    with tempfile.TemporaryDirectory() as folder:
        theirs = Theirs(workload, repeats + 1, ours.step, Path(folder))
        theirs.run()
    assert ours.drift < 1e-4, f"engine and trainer disagree by {ours.drift}"

    def row(metric: str, mine: float, peer: float) -> dict[str, Any]:
        return {
            "workload": workload.name,
            "metric": metric,
            "ours": mine,
            "peer": peer,
            "peer_name": "TRL GRPOTrainer",
            "ratio": peer / mine,
        }

    return [
        row(
            "seconds per step",
            statistics.median(ours.watch.seconds[1:]),
            statistics.median(theirs.watch.seconds[1:]),
        ),
        row("peak MB", peak_mb("ours", workload), peak_mb("trl", workload)),
    ]


def peak_mb(side: str, workload: Workload) -> float:
    """Peak memory of one side in a process of its own."""
    kind = "tools" if workload.tools else "single"
    command = [sys.executable, "-m", "tests.benchmarks._policy_step_memory", side]
    done = subprocess.run(
        [*command, str(workload.prompt), str(workload.group), kind],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure the chosen workloads and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="2 repeats instead of 10")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--only", help="workloads whose name contains this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    repeats = arguments.repeats or (2 if arguments.quick else 10)
    rows = []
    for workload in WORKLOADS:
        if not arguments.only or arguments.only in workload.name:
            rows += measure(workload, repeats)
            if not arguments.json:
                for each in rows[-2:]:
                    print(f"{each['workload']:16} {each['metric']:18} {each['ours']:9.3f} {each['peer']:9.3f} "
                          f"ratio {each['ratio']:.2f}", flush=True)  # fmt: skip
    report = {
        "name": "rl_step_vs_trl",
        "command": f"python -m tests.benchmarks.rl_step_vs_trl --json --repeats {repeats}",
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, one thread, "
        f"torch {torch.__version__}",
        "rows": rows,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
