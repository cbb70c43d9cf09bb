"""How many CPU threads torch uses; the same number gives the same bits on the same machine."""

from __future__ import annotations

from infra.settings import Settings


def configure_threads(settings: Settings) -> int:
    """Set torch's thread count from the settings and return it (0 = physical cores this process may use)."""
    import os

    import psutil
    import torch

    available = len(os.sched_getaffinity(0))
    threads = settings.threads or min(psutil.cpu_count(logical=False) or available, available)
    torch.set_num_threads(threads)
    return threads
