"""A process as one of many ranks, started by ``torchrun``.

``torchrun --standalone --nproc-per-node 8 --max-restarts 3 train.py`` starts the ranks of one machine; when one of them
dies, all are started anew, and each goes on from the newest checkpoint. ``--nnodes``, ``--rdzv-backend c10d`` and
``--rdzv-endpoint`` do the same for several machines (https://docs.pytorch.org/docs/stable/elastic/run.html).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.rendezvous import rendezvous

from infra.errors import UsageError

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others before it takes them for dead."""


@dataclass(frozen=True)
class Ranks:
    """One process among all ranks."""

    rank: int
    ranks: int
    device: torch.device
    restarts: int
    """How many times the ranks have been started anew."""


@contextmanager
def joined_ranks(timeout: timedelta = TIMEOUT) -> Iterator[Ranks]:
    """Join the ranks which torchrun started, over NCCL where there are GPUs, and leave them at the end.

    Without torchrun this process is the only rank.

    Raises:
        UsageError: torchrun's variables are incomplete, or there are more ranks than GPUs on this machine.
    """
    if "RANK" not in os.environ:
        distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    else:
        missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise UsageError(
                f"RANK is set, but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not",
                where="environment variables",
                fix="start the ranks with torchrun, or unset RANK",
            )
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if torch.cuda.is_available():
            if local >= torch.cuda.device_count():
                raise UsageError(
                    f"rank {local} of this machine has no GPU: there are {torch.cuda.device_count()}",
                    where="torchrun --nproc-per-node",
                    fix="start as many ranks as there are GPUs",
                )
            torch.cuda.set_device(local)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        store, rank, ranks = next(rendezvous("env://", timeout=timeout))
        # torchrun keeps its store over restarts; without a prefix the ranks would look for those that died.
        life = PrefixStore(f"life-{_restarts()}-of-{ranks}", store)
        distributed.init_process_group(backend, timeout=timeout, store=life, rank=rank, world_size=ranks)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        yield Ranks(
            rank=distributed.get_rank(),
            ranks=distributed.get_world_size(),
            device=device,
            restarts=_restarts(),
        )
    finally:
        distributed.destroy_process_group()


def _restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
