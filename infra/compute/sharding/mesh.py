"""The grid of ranks."""

from __future__ import annotations

from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from infra.compute.sharding.config import ShardingConfig
from infra.errors import UsageError

DATA, EXPERT, SEQUENCE = "data", "expert", "sequence"


def make_mesh(config: ShardingConfig, device: str = "cpu") -> DeviceMesh:
    """All ranks of the default process group as a mesh ``[data, expert, sequence]``.

    Ranks that differ only in their sequence coordinate hold parts of the same sequences; all others hold different
    ones. Every rank must call it.

    Raises:
        UsageError: the ranks cannot be divided so.
    """
    world, inner = distributed.get_world_size(), config.expert * config.sequence
    if world % inner:
        raise UsageError(
            f"{world} ranks cannot be divided into expert {config.expert} x sequence {config.sequence}",
            where="sharding",
            fix=f"start a multiple of {inner} ranks, or lower sharding.expert or sharding.sequence",
        )
    return init_device_mesh(
        device, (world // inner, config.expert, config.sequence), mesh_dim_names=(DATA, EXPERT, SEQUENCE)
    )
