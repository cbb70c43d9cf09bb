"""Expert parallelism: each rank of the expert axis holds its share of every layer's experts.

The tokens travel. transformers' own expert plan does it: an all-to-all brings each (token, expert) pair to the rank
that holds the expert, a second one brings the results back. The experts themselves are computed by
:mod:`infra.compute.experts` there too, so that no rank ever holds tokens x experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from infra.compute.experts import EXPERTS, register
from infra.compute.sharding.mesh import EXPERT
from infra.errors import UsageError

_EXCHANGE, _SHARE = "ep_dispatch_experts", "grouped_gemm"
"""transformers' names for the exchange of tokens, and for a weight divided by experts."""


def divide_experts(model: Any, mesh: DeviceMesh) -> list[nn.Module]:
    """Keep only this rank's experts in every layer (in place); returns the modules, for ``fsdp.shard``.

    The expert axis is a data axis too: its ranks hold different rows. All of them must run the same number of forward
    and backward passes, with however few tokens. Do it before adapters are added and before the model is sharded.

    Args:
        mesh: from ``mesh.make_mesh``; with an expert axis of one rank nothing happens.

    Raises:
        UsageError: the model has no experts that are known, or their number cannot be divided.
    """
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    ranks = mesh[EXPERT].size()
    if ranks == 1:
        return []
    found = {name: module for name, module in model.named_modules() if isinstance(module, GptOssExperts)}
    if not found:
        raise UsageError(
            f"{type(model).__name__} has no GPT-OSS experts to divide",
            where="sharding.expert",
            fix="set sharding.expert to 1",
        )
    count = model.config.num_local_experts
    if count % ranks:
        raise UsageError(
            f"{count} experts cannot be divided among {ranks} ranks",
            where="sharding.expert",
            fix=f"set sharding.expert to a divisor of {count}",
        )
    register()
    model.set_experts_implementation(EXPERTS)
    plan: dict[str, str] = {}
    for name, module in found.items():
        plan |= {f"{name}.{weight}": _SHARE for weight, _ in module.named_parameters(recurse=False)}
        plan[name] = _EXCHANGE
    apply_expert_parallelism(model, mesh[EXPERT], _alone(mesh.device_type), plan, "all_to_all")
    return list(found.values())


def _alone(device: str) -> DeviceMesh:
    """An axis of one rank: the plan can also divide one batch over a tensor-parallel group, which we do not have."""
    everyone = torch.arange(distributed.get_world_size())[:, None]
    return DeviceMesh(device, everyone, mesh_dim_names=("everyone", "alone"))["alone"]
