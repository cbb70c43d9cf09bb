"""Which kernel computes on this machine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from infra.compute.attention.cuda import CANDIDATES, FlashAttn4Kernel
from infra.compute.attention.kernels import CpuKernel, EagerKernel, Kernel
from infra.errors import UsageError

AnyKernel = Kernel | FlashAttn4Kernel


@dataclass(frozen=True)
class Availability:
    """A kernel, and why it cannot be used here (None = it can)."""

    name: str
    why_not: str | None


def available() -> list[Availability]:
    """Every kernel there is, in the order in which they are chosen."""
    found = [Availability(candidate.make.name, candidate.why_not()) for candidate in CANDIDATES]
    return [*found, Availability(CpuKernel.name, None), Availability(EagerKernel.name, None)]


def choose(device: torch.device, dtype: torch.dtype, head_dim: int) -> AnyKernel:
    """The fastest kernel for tensors of this kind; float32 and float64 on a GPU only have ``eager``.

    Raises:
        UsageError: the device is neither a CPU nor a GPU.
    """
    if device.type == "cpu":
        return CpuKernel()
    if device.type != "cuda":
        raise UsageError(
            f"no attention kernel with sinks for device {device.type}",
            where="sink attention",
            fix="train on CPU or on NVIDIA GPUs",
        )
    if dtype in (torch.bfloat16, torch.float16) and head_dim <= 256 and head_dim % 8 == 0:
        for candidate in CANDIDATES:
            if candidate.why_not() is None:
                made: AnyKernel = candidate.make()
                return made
    return EagerKernel()
