"""Weights of GPT-OSS type models in the layout that decoding wants."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerWeights:
    """One layer. ``qkv*``, ``gate_up*`` are copies in another layout; the rest are the model's own tensors.

    Attributes:
        qkv: ``[(heads + 2 kv_heads) head_dim, hidden]``; queries carry the softmax scale, and the two halves
            that a rotation mixes lie next to each other in queries and keys.
        sinks: ``[heads]``.
        gate_up: ``[experts, hidden, 2 intermediate]``: gates times alpha, then linear parts over alpha.
        gate_up_bias: ``[experts, 1, 2 intermediate]``, with the linear part's ``+ 1`` in it.
        down: ``[experts, intermediate, hidden]``.
        window: None for full attention.
    """

    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    sinks: Tensor
    norm_in: Tensor
    norm_mid: Tensor
    router: Tensor
    router_bias: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor
    down: Tensor
    down_bias: Tensor
    window: int | None


@dataclass(frozen=True)
class Weights:
    """The whole model.

    With gate ``g`` and linear part ``u``, both clamped at the model's limit, an expert's inner value
    ``(u + 1) g sigmoid(alpha g)`` is ``silu(G) U`` with ``G = alpha g <= gate_max`` and
    ``U = (u + 1) / alpha`` in ``up_range``.
    """

    embedding: Tensor
    norm: Tensor
    head: Tensor
    turns: Tensor
    """Complex ``cos + i sin`` of every position, ``[positions, head_dim / 2]``."""
    layers: tuple[LayerWeights, ...]
    gate_max: float
    up_range: tuple[float, float]

    def copies(self) -> Iterator[Tensor]:
        """What is stale after an update of the model, until it is fused again."""
        for layer in self.layers:
            yield from (x for x in (layer.qkv, layer.qkv_bias, layer.gate_up, layer.gate_up_bias) if x is not None)

    def shared(self) -> Iterator[Tensor]:
        """The model's own tensors."""
        yield from (self.embedding, self.norm, self.head)
        for layer in self.layers:
            tensors = (layer.out, layer.out_bias, layer.sinks, layer.norm_in, layer.norm_mid)
            yield from (x for x in tensors if x is not None)
            yield from (layer.router, layer.router_bias, layer.down, layer.down_bias)


def interleaved(head_dim: int) -> Tensor:
    """Indices that put the halves of a head's dimensions next to each other: ``0, d/2, 1, d/2 + 1, …``."""
    return torch.arange(head_dim).view(2, -1).t().flatten()


@torch.no_grad()
def fuse(model: Any) -> Weights:
    """Lay out the present weights of a ``GptOssForCausalLM``."""
    config, inner = model.config, model.model
    experts = inner.layers[0].mlp.experts
    positions = torch.arange(config.max_position_embeddings)
    embedding = inner.embed_tokens.weight.detach()
    cos, sin = inner.rotary_emb(embedding[:1], positions[None])
    half = config.head_dim // 2
    return Weights(
        embedding=embedding,
        norm=inner.norm.weight.detach(),
        head=model.lm_head.weight.detach(),
        turns=torch.complex(cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()),
        layers=tuple(
            _layer(layer, config, config.sliding_window if kind == "sliding_attention" else None)
            for layer, kind in zip(inner.layers, config.layer_types, strict=True)
        ),
        gate_max=experts.alpha * experts.limit,
        up_range=((1 - experts.limit) / experts.alpha, (1 + experts.limit) / experts.alpha),
    )


def _layer(layer: Any, config: Any, window: int | None) -> LayerWeights:
    attention, experts, router = layer.self_attn, layer.mlp.experts, layer.mlp.router
    order = interleaved(config.head_dim)
    scale = config.head_dim**-0.5

    def turned(x: Tensor) -> Tensor:
        return x.view(-1, config.head_dim, *x.shape[1:])[:, order].reshape(x.shape)

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([turned(q) * scale, turned(k), v])

    q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
    alpha = experts.alpha
    weight, bias = experts.gate_up_proj.detach(), experts.gate_up_proj_bias.detach()[:, None]
    return LayerWeights(
        qkv=fused(q.weight, k.weight, v.weight),
        qkv_bias=None if q.bias is None else fused(q.bias, k.bias, v.bias),
        out=attention.o_proj.weight.detach(),
        out_bias=None if attention.o_proj.bias is None else attention.o_proj.bias.detach(),
        sinks=attention.sinks.detach(),
        norm_in=layer.input_layernorm.weight.detach(),
        norm_mid=layer.post_attention_layernorm.weight.detach(),
        router=router.weight.detach(),
        router_bias=router.bias.detach(),
        gate_up=torch.cat([weight[..., ::2] * alpha, weight[..., 1::2] / alpha], -1),
        gate_up_bias=torch.cat([bias[..., ::2] * alpha, (bias[..., 1::2] + 1) / alpha], -1),
        down=experts.down_proj.detach(),
        down_bias=experts.down_proj_bias.detach(),
        window=window,
    )
