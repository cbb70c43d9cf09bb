"""Runs the benchmarks in this folder and rewrites ``docs/benchmarks.md``: ``python -m tests.benchmarks [NAME …]``.

Without names all of them run: ``memory_per_token`` and ``rl_step_vs_trl``. Options such as ``--quick`` are passed on.
Each report, unless made with ``--only``, is kept in ``results``; the page shows the newest of every benchmark.
``--render`` alone runs nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
RESULTS = FOLDER / "results"
TABLE = ROOT / "docs" / "benchmarks.md"
HEADER = """\
# Benchmarks

Written by `make bench`, measured on the machine named below the table. A ratio above 1 means that Senmon is better.

| benchmark | workload | metric | ours | peer | ratio |
|---|---|---|---|---|---|
"""


def main(arguments: Sequence[str]) -> int:
    """Exit code 1 if a benchmark failed (its last report stays on the page) or missed a bar (the page says so)."""
    names = list(takewhile(lambda word: not word.startswith("-"), arguments))
    options = arguments[len(names) :]
    if options != ["--render"]:
        for name in names or sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_")):
            if not run(name, options):
                return 1
    reports = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(render(reports))
    print(f"wrote {TABLE.relative_to(ROOT)}")
    return 0 if all(bar["met"] for report in reports for bar in report.get("bars", ())) else 1


def run(name: str, options: Sequence[str]) -> bool:
    """Run one benchmark and keep its report; False if it has none."""
    command = [sys.executable, "-m", f"tests.benchmarks.{name}", "--json", *options]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    last = done.stdout.splitlines()[-1:]
    if not last or not last[0].startswith("{"):
        print(f"benchmark {name} failed with exit code {done.returncode}", file=sys.stderr)
        return False
    if any(option.startswith("--only") for option in options):  # a part must not take the place of the whole
        print(last[0])
        return True
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(json.loads(last[0]), indent=1) + "\n")
    return True


def render(reports: Sequence[dict[str, Any]]) -> str:
    """The Markdown page."""
    rows = [render_row(report["name"], row) for report in reports for row in report["rows"]]
    sources = [f"- {report['name']}: `{report['command']}` on {report['machine']}" for report in reports]
    page = HEADER + "\n".join(rows) + "\n\n" + "\n".join(sources) + "\n"
    bars = [
        f"- {bar['bar']}: {bar['value']:.3g}, {'met' if bar['met'] else '**missed**'}"
        for report in reports
        for bar in report.get("bars", ())
    ]
    notes = [f"- {report['name']}: {report['note']}" for report in reports if "note" in report]
    for title, lines in (("Bars", bars), ("Notes", notes)):
        page += f"\n{title}:\n\n" + "\n".join(lines) + "\n" if lines else ""
    return page


def render_row(name: str, row: dict[str, Any]) -> str:
    """A line of the table; where no peer can run the workload, a dash."""
    peer, ratio = "–", "–"
    if row["peer"] is not None:
        peer, ratio = f"{row['peer']:.4g} ({row['peer_name']})", f"{row['ratio']:.2f}"
    return f"| {name} | {row['workload']} | {row['metric']} | {row['ours']:.4g} | {peer} | {ratio} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
