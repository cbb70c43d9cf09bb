"""Runs a domain with several seeds through ``senmon run`` and keeps every result, good or bad.

``python -m tests.evidence.seeds invoice_approval --seeds 5`` writes ``tests/evidence/seeds_invoice_approval.json``
and prints the table of the README; the figures of every RL step go to ``tests/rl/data/healthy_invoice_approval.json``,
over which the guards must stay silent. Each seed runs in a home of its own; data and splits are the same for all.
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
    "guard_alarms",
    "seconds",
)


def run_seed(domain: str, seed: int, home: Path) -> tuple[dict[str, Any], dict[str, list[float | None]]]:
    """Summary of one run and its RL figures step by step; a run that fails is an error, not a missing row."""
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
    series = rl_series(home)
    summary["guard_alarms"] = sum(value or 0 for value in series["rl.alarms"])
    return {"seed": seed, "exit_code": done.returncode, **{key: summary.get(key) for key in KEPT}}, series


def rl_series(home: Path) -> dict[str, list[float | None]]:
    """Every figure of the RL steps from the home's MLflow store, to four digits; None where a step has none."""
    from infra.mlflow_client import open_client
    from infra.settings import Settings

    client = open_client(Settings(home=home, catalog_url="", tracking_uri=""))
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    names = [name for name in run.data.metrics if name.startswith("rl.")]
    history = {name: {m.step: m.value for m in client.get_metric_history(run.info.run_id, name)} for name in names}
    steps = sorted(history["rl.episodes"])
    return {
        name: [float(f"{values[step]:.4g}") if step in values else None for step in steps]
        for name, values in sorted(history.items())
        if set(values) & set(steps)
    }


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
    rows, recorded = [], {}
    for seed in range(arguments.seeds):
        with tempfile.TemporaryDirectory() as home:
            row, recorded[f"seed {seed}"] = run_seed(arguments.domain, seed, Path(home))
        rows.append(row)
        print(json.dumps(rows[-1]), flush=True)
    result = {
        "domain": arguments.domain,
        "command": f"python -m tests.evidence.seeds {arguments.domain} --seeds {arguments.seeds}",
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}",
        "rows": rows,
    }
    (HERE / f"seeds_{arguments.domain}.json").write_text(json.dumps(result, indent=1) + "\n")
    data = HERE.parent / "rl" / "data" / f"healthy_{arguments.domain}.json"
    data.write_text(json.dumps(recorded) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
