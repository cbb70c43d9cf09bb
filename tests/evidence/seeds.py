"""Runs a domain with several seeds through ``senmon run`` and keeps every result, good or bad.

``python -m tests.evidence.seeds invoice_approval --seeds 5`` writes ``tests/evidence/seeds_invoice_approval.json``
and prints the table of the README. Each seed runs in a home of its own; data and splits are the same for all.
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

HERE = Path(__file__).parent
KEPT = (
    "sft.heldout_success",
    "rl.heldout_success",
    "rl.heldout_success_sampled",
    "thinking_token_ratio",
    "kl_to_reference",
    "seconds",
)


def run_seed(domain: str, seed: int, home: Path) -> dict[str, Any]:
    """The summary of one run; a run that fails is an error here, not a missing row."""
    command = [sys.executable, "-m", "pipelines.cli", "run", domain, "--json", "--set", f"seed={seed}"]
    done = subprocess.run(
        command,
        env={**os.environ, "SENMON_HOME": str(home)},
        cwd=HERE.parents[1],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    summary = json.loads(done.stdout.splitlines()[-1])
    return {"seed": seed, "exit_code": done.returncode, **{key: summary.get(key) for key in KEPT}}


def table(rows: list[dict[str, Any]]) -> str:
    """The results as a Markdown table, all seeds and their median."""
    lines = ["| seed | cold start | after RL | after RL, sampled | gain | seconds |", "|---|---|---|---|---|---|"]
    for row in rows:
        before, after, sampled = (row[key] for key in KEPT[:3])
        figures = f"{before:.3f} | {after:.3f} | {sampled:.3f} | +{after - before:.3f} | {row['seconds']:.0f}"
        lines.append(f"| {row['seed']} | {figures} |")
    median = [statistics.median(row[key] for row in rows) for key in KEPT[:3]]
    gain = statistics.median(row[KEPT[1]] - row[KEPT[0]] for row in rows)
    lines.append(f"| median | {median[0]:.3f} | {median[1]:.3f} | {median[2]:.3f} | +{gain:.3f} | |")
    return "\n".join(lines)


def main() -> None:
    """Run the seeds one after the other and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("domain")
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    rows = []
    for seed in range(arguments.seeds):
        with tempfile.TemporaryDirectory() as home:
            rows.append(run_seed(arguments.domain, seed, Path(home)))
        print(json.dumps(rows[-1]), flush=True)
    result = {
        "domain": arguments.domain,
        "command": f"python -m tests.evidence.seeds {arguments.domain} --seeds {arguments.seeds}",
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}",
        "rows": rows,
    }
    (HERE / f"seeds_{arguments.domain}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
