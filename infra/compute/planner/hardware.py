"""GPUs as people write them: ``64xH100-80GB``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from infra.errors import UsageError

GIB = 2**30
RESERVE = 0.08
"""Share of a GPU's memory left to the driver, communication buffers and fragmentation."""


@dataclass(frozen=True)
class Gpus:
    """A number of equal GPUs; the name ``CPU`` means host memory and the kernels for CPUs."""

    count: int
    name: str
    gib: int
    """Memory of each, GiB."""

    @property
    def usable(self) -> int:
        """Bytes of each that a plan may fill."""
        return int(self.gib * GIB * (1 - RESERVE))

    @property
    def cpu(self) -> bool:
        """Whether it is a CPU."""
        return self.name.upper() == "CPU"

    def __str__(self) -> str:
        return f"{self.count}x{self.name}-{self.gib}GB"


def parse_gpus(text: str) -> Gpus:
    """Read ``COUNTxNAME-SIZEGB``, for example ``8xA100-40GB`` or ``1xCPU-24GB``.

    Raises:
        UsageError: it is written another way, or count or size is 0.
    """
    found = re.fullmatch(r"(\d{1,6})x([A-Za-z0-9]+(?:-[A-Za-z0-9]+)*)-(\d{1,6})GB", text.strip())
    if found is None or not int(found[1]) or not int(found[3]):
        raise UsageError(
            f"{text!r} does not describe GPUs", where="--gpus", fix="write COUNTxNAME-SIZEGB, for example 64xH100-80GB"
        )
    return Gpus(int(found[1]), found[2], int(found[3]))
