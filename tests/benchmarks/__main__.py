"""Runs every benchmark in this folder and rewrites ``docs/benchmarks.md``; ``--quick`` is passed on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
TABLE = ROOT / "docs" / "benchmarks.md"
HEADER = """\
# Benchmarks

Written by `make bench`, measured on the machine named below the table. A ratio above 1 means that Senmon is better.

| benchmark | workload | metric | ours | peer | ratio |
|---|---|---|---|---|---|
"""


def main(arguments: Sequence[str]) -> int:
    """Exit code 1 if a benchmark failed; the table then keeps what was written before."""
    reports = []
    for path in sorted(FOLDER.glob("*.py")):
        if path.stem.startswith("_"):
            continue
        command = [sys.executable, "-m", f"tests.benchmarks.{path.stem}", "--json", *arguments]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            print(f"benchmark {path.stem} failed with exit code {done.returncode}", file=sys.stderr)
            return 1
        reports.append(json.loads(done.stdout.splitlines()[-1]))
    if not reports:
        print("there is no benchmark yet", file=sys.stderr)
        return 0
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(render(reports))
    print(f"wrote {TABLE.relative_to(ROOT)}")
    return 0


def render(reports: Sequence[dict[str, Any]]) -> str:
    """The Markdown page."""
    rows = [
        f"| {report['name']} | {row['workload']} | {row['metric']} | {row['ours']:.4g} | "
        f"{row['peer']:.4g} ({row['peer_name']}) | {row['ratio']:.2f} |"
        for report in reports
        for row in report["rows"]
    ]
    sources = [f"- {report['name']}: `{report['command']}` on {report['machine']}" for report in reports]
    return HEADER + "\n".join(rows) + "\n\n" + "\n".join(sources) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
