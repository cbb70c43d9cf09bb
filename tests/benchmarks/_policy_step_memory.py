"""Peak memory of one side alone, in a process of its own: ``python -m … ours|trl PROMPT GROUP single|tools``.

Two sides in one process would use each other's freed memory and measure nothing.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

from tests.benchmarks._policy_step import Ours, Theirs, Workload


def main(side: str, prompt: str, group: str, kind: str) -> None:
    """Print the largest resident memory, in MB, that two steps needed beyond what was there before the first."""
    torch.set_num_threads(1)
    workload = Workload(int(prompt), int(group), kind == "tools")
    if side == "ours":
        ours = Ours(workload)
        for _ in range(2):
            ours.step()
        watch = ours.watch
    else:
        with tempfile.TemporaryDirectory() as folder:
            theirs = Theirs(workload, 2, lambda: None, Path(folder))
            theirs.run()
        watch = theirs.watch
    print(max(peak + rss - watch.rss_mb[0] for peak, rss in zip(watch.peaks_mb, watch.rss_mb, strict=True)))


if __name__ == "__main__":
    main(*sys.argv[1:])
