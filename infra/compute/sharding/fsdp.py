"""Weights, gradients and optimizer states divided over all ranks (FSDP2), layer by layer.

Losses are divided by the number of tokens of *all* ranks before they are differentiated, so that gradients are added
up over ranks, never averaged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from infra.compute.sharding.config import ShardingConfig
from infra.compute.sharding.mesh import DATA, EXPERT, SEQUENCE
from infra.compute.sharding.precision import mixed_precision
from infra.compute.sharding.recompute import recompute_in_backward
from infra.errors import CheckFailed, UsageError
from infra.telemetry import logger

ALL, BESIDE_EXPERTS = "all", "beside_experts"
"""Names of the flattened meshes: every rank, and the ranks that hold the same experts."""
Model = TypeVar("Model", bound=nn.Module)
Part = TypeVar("Part")


def shard(model: Model, mesh: DeviceMesh, config: ShardingConfig, experts: Sequence[nn.Module] = ()) -> Model:
    """Divide a model (in place) so that every rank holds ``1 / ranks`` of each weight; every rank must call it.

    A layer's weights are gathered when it computes and freed afterwards. The optimizer must be made afterwards. The
    model may still be on the meta device (``loading.load_weights`` fills it then).

    Args:
        model: a transformers model, plain or wrapped by peft.
        mesh: from ``mesh.make_mesh``.
        experts: modules that ``expert.divide_experts`` has given to the ranks of the expert axis; each is divided
            further over the ranks that hold the same experts. Without an expert axis they are divided like the rest.

    Raises:
        UsageError: the model has no transformers layers, or the mesh has an expert axis and no experts are given.
    """
    layers = transformer_layers(model)
    if mesh[EXPERT].size() > 1 and not experts:
        raise UsageError(
            f"{mesh[EXPERT].size()} ranks are to divide experts among them, and no layer's experts are divided",
            where="sharding.expert",
            fix="make the model expert-parallel before it is sharded, or set sharding.expert to 1",
        )
    divide = partial(
        fully_shard, mp_policy=mixed_precision(model, config), offload_policy=_offload(config, mesh.device_type)
    )
    if config.activation_checkpointing:
        for layer in layers:
            recompute_in_backward(layer)
    if mesh[EXPERT].size() > 1:
        same_experts = mesh[DATA, SEQUENCE]._flatten(BESIDE_EXPERTS)
        for divided in experts:
            divide(divided, mesh=same_experts, shard_placement_fn=_even(same_experts.size()))
    everyone = mesh._flatten(ALL)
    for whole in [*layers, *_untied_ends(model), model]:
        divide(whole, mesh=everyone, shard_placement_fn=_even(everyone.size()))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo knows no other way of reducing, and a sum is what is wanted.
            module.set_force_sum_reduction_for_comms(True)
            # A rank without a token for these weights must take part in the sum all the same.
            module.set_reduce_scatter_unused_params(True, recurse=False)
    return model


def _even(ranks: int) -> Callable[[nn.Parameter], Shard | None]:
    """Along which axis a weight is cut: the first whose size the ranks divide, so that nothing is padded.

    32 experts over 64 ranks would otherwise leave half of the ranks with nothing and the others with twice their part.
    """

    def axis(weight: nn.Parameter) -> Shard | None:
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        return next((Shard(axis) for axis, size in enumerate(local.shape) if size % ranks == 0), None)

    return axis


def micro_batches(model: nn.Module, parts: Sequence[Part]) -> Iterator[Part]:
    """Yield the parts of one step; gradients are added over ranks in the backward pass of the last one only.

    Saves communication; until then each rank holds the whole gradients of its parts, so that models which only just
    fit should run their backward passes without it. All ranks must have the same number of parts.
    """
    if not isinstance(model, FSDPModule):
        raise TypeError("micro_batches needs a model that shard() has divided")
    try:
        for index, part in enumerate(parts):
            last = index == len(parts) - 1
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            yield part
    finally:
        model.set_requires_gradient_sync(True)
        model.set_is_last_backward(True)


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> float:
    """Scale gradients down to a global norm of ``max_norm`` at most; returns the norm before. All ranks must call it.

    The same as ``torch.nn.utils.clip_grad_norm_`` on one rank, for weights divided over any axes: the pieces of all
    ranks, expert-parallel ones included, make up the whole exactly once. A norm that is NaN or infinite leaves the
    gradients as they are; the caller must look at it.

    Raises:
        CheckFailed: among several ranks, a gradient is not divided, so that it would count once per rank.
    """
    local = [_piece(parameter.grad) for parameter in parameters if parameter.grad is not None]
    device = local[0].device if local else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for piece in local:
        total += torch.linalg.vector_norm(piece, dtype=torch.promote_types(piece.dtype, torch.float32)).double() ** 2
    if distributed.is_initialized():
        distributed.all_reduce(total)
    norm = math.sqrt(float(total))
    scale = max_norm / (norm + 1e-6)
    if scale < 1 and math.isfinite(norm):
        torch._foreach_mul_(local, scale)
    return norm


def _piece(gradient: Tensor) -> Tensor:
    """What this rank holds of a gradient."""
    if isinstance(gradient, DTensor):
        if not any(placement.is_replicate() and size > 1 for placement, size in _axes(gradient)):
            return gradient.to_local()
    elif not distributed.is_initialized() or distributed.get_world_size() == 1:
        return gradient
    raise CheckFailed(
        f"a gradient of shape {list(gradient.shape)} is whole on several ranks and would count more than once",
        where="gradient clipping",
        fix="divide the model with shard() first",
    )


def _axes(tensor: DTensor) -> list[tuple[Any, int]]:
    return list(zip(tensor.placements, tensor.device_mesh.shape, strict=True))


def transformer_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a transformers model, first one first.

    Raises:
        UsageError: it has none that are known.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UsageError(
            f"{type(model).__name__} has no layers that are known",
            where="sharding",
            fix="use a transformers causal language model",
        )
    return layers


def _untied_ends(model: Any) -> list[nn.Module]:
    """Embedding and head, each as large as several layers; a weight that both share must stay with the root."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    if any(end is None for end in ends) or ends[0].weight is ends[1].weight:
        return []
    return ends


def _offload(config: ShardingConfig, device: str) -> OffloadPolicy:
    if not config.offload:
        return OffloadPolicy()
    if device == "cpu":
        logger.warning("sharding.offload has no effect: on this device all weights are in host memory anyway")
        return OffloadPolicy()
    return CPUOffloadPolicy()
