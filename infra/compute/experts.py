"""Mixture-of-experts layers of GPT-OSS, one expert at a time, with hardly any memory.

Assignments (token, slot) are sorted by expert once. Each expert then takes its tokens in blocks: gather, two products,
weighted add into the output, all of it freed before the next block. Only the layer's inputs and the sort order are
kept; the backward pass computes a block's activations again, with the experts the forward pass chose.

With ``a = x W1 + b1``, gate ``g`` and linear part ``u`` (even and odd columns of ``a``, clamped at ``limit``),
``h = (u + 1) g sigmoid(alpha g)`` and ``y = sum_e w_e (h W2 + b2)``, the gradient ``r = dy W2^T`` serves twice: the
routing weight's is ``dw_e = r . h + dy . b2`` and that of ``h`` is ``w_e r``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from infra.errors import UsageError

EXPERTS = "senmon_sorted"
"""Name under which transformers knows this execution: ``model.set_experts_implementation(EXPERTS)``."""
BLOCK = 1024
"""Tokens of one expert whose activations are alive at once."""


@dataclass(frozen=True)
class ExpertWeights:
    """Parameters of all experts of a layer, as GptOss lays them out, and the two constants of its gate.

    ``gate_up [experts, hidden, 2 * intermediate]`` (gate and linear part interleaved), ``gate_up_bias
    [experts, 2 * intermediate]``, ``down [experts, intermediate, hidden]``, ``down_bias [experts, hidden]``.
    """

    gate_up: Tensor
    gate_up_bias: Tensor
    down: Tensor
    down_bias: Tensor
    alpha: float
    limit: float


def sorted_experts(hidden: Tensor, ids: Tensor, routing: Tensor, experts: ExpertWeights, block: int = BLOCK) -> Tensor:
    """Sum over each token's experts of routing weight times expert output, ``[tokens, hidden]``.

    Equals transformers' eager experts, gradients of everything included; experts without a token get a gradient of
    zeros, as they do there. Half-precision outputs are summed up in float32. An id equal to the number of experts
    (a slot that another rank of an expert-parallel group computes) adds nothing.

    Args:
        hidden: ``[tokens, hidden]``.
        ids: expert ids ``[tokens, experts per token]``.
        routing: routing weights of the same shape.
        experts: the layer's parameters.
        block: largest number of tokens taken at once.

    Raises:
        ValueError: an expert id is outside ``0 … experts``.
    """
    count = experts.gate_up.shape[0]
    order = ids.flatten().argsort(stable=True)
    sizes = torch.bincount(ids.flatten(), minlength=count + 1).tolist()
    if len(sizes) > count + 1:
        raise ValueError(f"expert id {len(sizes) - 1} in a layer of {count} experts")
    blocks = tuple(_blocks(sizes[:count], block))
    return _SortedExperts.apply(  # type: ignore[no-any-return, no-untyped-call]
        hidden, routing, experts.gate_up, experts.gate_up_bias, experts.down, experts.down_bias, order,
        _Plan(blocks, ids.shape[1], experts.alpha, experts.limit),
    )  # fmt: skip


@dataclass(frozen=True)
class _Block:
    """Assignments ``start … stop - 1`` of the sort order, all of one expert."""

    expert: int
    start: int
    stop: int


@dataclass(frozen=True)
class _Plan:
    blocks: tuple[_Block, ...]
    slots: int
    """Experts per token."""
    alpha: float
    limit: float


def _blocks(sizes: Sequence[int], block: int) -> Iterator[_Block]:
    start = 0
    for expert, size in enumerate(sizes):
        stop = start + size
        for first in range(start, stop, block):
            yield _Block(expert, first, min(first + block, stop))
        start = stop


class _SortedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        routing: Tensor,
        gate_up: Tensor,
        gate_up_bias: Tensor,
        down: Tensor,
        down_bias: Tensor,
        order: Tensor,
        plan: _Plan,
    ) -> Tensor:
        ctx.save_for_backward(hidden, routing, gate_up, gate_up_bias, down, down_bias, order)
        ctx.plan = plan
        out = torch.zeros_like(hidden, dtype=_sum_dtype(hidden))
        weights = routing.flatten()
        for block in plan.blocks:
            slot = order[block.start : block.stop]
            token, e = slot // plan.slots, block.expert
            # One name for all stages: each frees the one before.
            x = hidden.index_select(0, token)
            x = torch.addmm(gate_up_bias[e], x, gate_up[e])
            x = _swiglu(x, plan)
            x = torch.addmm(down_bias[e], x, down[e])
            x = x.mul_(weights[slot, None]).to(out.dtype)
            out.index_add_(0, token, x)
        return out.to(hidden.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, routing, gate_up, gate_up_bias, down, down_bias, order = ctx.saved_tensors
        plan: _Plan = ctx.plan
        weights = routing.flatten()
        d_hidden = torch.zeros_like(hidden, dtype=_sum_dtype(hidden))
        d_weights = torch.zeros_like(weights)
        trained = any(ctx.needs_input_grad[2:6])
        parameters = (gate_up, gate_up_bias, down, down_bias)
        d_experts = [torch.zeros_like(p) for p in parameters] if trained else []
        for block in plan.blocks:
            slot = order[block.start : block.stop]
            token, e = slot // plan.slots, block.expert
            x, dy, w = hidden.index_select(0, token), grad.index_select(0, token), weights[slot, None]
            dh = dy @ down[e].T
            h, da = _swiglu_backward(torch.addmm(gate_up_bias[e], x, gate_up[e]), dh, plan)
            d_weights[slot] = (dh.mul_(h).sum(1) + dy @ down_bias[e]).to(weights.dtype)
            del dh
            da.mul_(w)
            if trained:
                dy.mul_(w)
                d_experts[0][e].addmm_(x.T, da)
                d_experts[1][e] += da.sum(0)
                d_experts[2][e].addmm_(h.T, dy)
                d_experts[3][e] += dy.sum(0)
            del x, dy, h
            d_hidden.index_add_(0, token, (da @ gate_up[e].T).to(d_hidden.dtype))
            del da
        found = d_experts if trained else [None] * 4
        return d_hidden.to(hidden.dtype), d_weights.view_as(routing), *found, None, None


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype.itemsize < 4 else x.dtype


def _swiglu(a: Tensor, plan: _Plan) -> Tensor:
    """``[tokens, 2 * intermediate]`` to ``[tokens, intermediate]``."""
    gate = a[:, ::2].clamp(max=plan.limit)
    linear = a[:, 1::2].clamp(-plan.limit, plan.limit)
    return (gate * plan.alpha).sigmoid_().mul_(gate).mul_(linear.add_(1))


def _swiglu_backward(a: Tensor, dh: Tensor, plan: _Plan) -> tuple[Tensor, Tensor]:
    """Output of :func:`_swiglu`, and the gradient of ``a`` for ``dh``; at a clamp's limit it still flows, as in torch.

    With ``s = sigmoid(alpha g)`` and ``v = g s``: ``dv / dg = s (1 + alpha (g - v))``.
    """
    gate, linear = a[:, ::2], a[:, 1::2]
    g = gate.clamp(max=plan.limit)
    u = linear.clamp(-plan.limit, plan.limit).add_(1)
    s = (g * plan.alpha).sigmoid_()
    v = g * s
    da = torch.empty_like(a)
    torch.mul(v, dh, out=da[:, 1::2]).mul_(linear.abs() <= plan.limit)
    slope = g.sub_(v).mul_(plan.alpha).add_(1).mul_(s)
    torch.mul(slope.mul_(u), dh, out=da[:, ::2]).mul_(gate <= plan.limit)
    return v.mul_(u), da


def _forward(module: Any, hidden: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
    """The experts function for transformers' ``ExpertsInterface``.

    Raises:
        UsageError: the layer is not GptOss's.
    """
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    if not isinstance(module, GptOssExperts):
        raise UsageError(
            f"sorted experts know the gate of GPT-OSS only, not that of {type(module).__name__}",
            where=f"experts implementation {EXPERTS!r}",
            fix='use experts_implementation="grouped_mm" or "eager" for this model',
        )
    experts = ExpertWeights(
        module.gate_up_proj, module.gate_up_proj_bias, module.down_proj, module.down_proj_bias,
        module.alpha, module.limit,
    )  # fmt: skip
    return sorted_experts(hidden, ids, routing, experts)


def register() -> None:
    """Make the execution known to transformers (again and again is fine)."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(EXPERTS, _forward)


def freeze_router(model: Any) -> list[str]:
    """Stop training the routers of a GptOss model and return their parameters' names.

    The routing weights still pass gradients on to the hidden states. Call it before the optimizer is made.

    Raises:
        UsageError: the model has no GptOss router.
    """
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter

    frozen = []
    for name, module in model.named_modules():
        if isinstance(module, GptOssTopKRouter):
            for part, parameter in module.named_parameters():
                parameter.requires_grad_(False)
                frozen.append(f"{name}.{part}")
    if not frozen:
        raise UsageError(
            f"{type(model).__name__} has no router to freeze",
            where="freeze_router",
            fix="freeze the router of GPT-OSS models only",
        )
    return frozen
