"""A decoder for GPT-OSS type models: fused projections, static caches, all experts in one product.

Same numbers as ``GptOssForCausalLM`` in float32 up to rounding (checked in the tests); several times fewer
operations per decoded token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from infra.compute.attention.shared_prefix import make_layout, packed_logits

BLOCKED = -1e9
DENSE_PREFILL = 128
"""Prompts up to this many tokens are prefilled as one padded batch, longer ones packed."""


@dataclass
class _Layer:
    """Weights of one layer in the layout the decoder wants; ``window`` is None for full attention."""

    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    sinks: Tensor
    norm_in: Tensor
    norm_mid: Tensor
    router: Tensor
    router_bias: Tensor
    gate: Tensor
    gate_bias: Tensor
    up: Tensor
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor
    window: int | None


@dataclass
class _Cache:
    """Keys and values ``[rows, kv_heads, capacity, head_dim]`` per layer."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[2] if self.keys else 0

    @property
    def rows(self) -> int:
        return self.keys[0].shape[0] if self.keys else 0


class GptOssDecoder:
    """Implements :class:`~infra.inference.embedded.decoder.Decoder`; memory grows by doubling."""

    def __init__(self, model: Any) -> None:
        self.model = model
        config = model.config
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.experts, self.top_k, self.eps = (
            config.num_local_experts,
            config.num_experts_per_tok,
            config.rms_norm_eps,
        )
        self.size = 0
        self.chunked = True
        self._cache = _Cache()
        self._lengths = torch.zeros(0, dtype=torch.long)
        self.sync()

    @torch.no_grad()
    def sync(self) -> None:
        """Rebuild the fused weights from the model's parameters."""
        if self.size:
            raise RuntimeError("weights changed while sequences are open: release them first")
        inner = self.model.model
        self._embedding, self._norm, self._head = (
            inner.embed_tokens.weight.detach(),
            inner.norm.weight.detach(),
            self.model.lm_head.weight.detach(),
        )
        types = self.model.config.layer_types
        window = self.model.config.sliding_window
        self._layers = [
            _layer(layer, window if kind == "sliding_attention" else None)
            for layer, kind in zip(inner.layers, types, strict=True)
        ]
        self._alpha, self._limit = inner.layers[0].mlp.experts.alpha, inner.layers[0].mlp.experts.limit
        positions = torch.arange(self.model.config.max_position_embeddings)
        cos, sin = inner.rotary_emb(self._embedding[:1], positions[None])
        half = self.head_dim // 2
        self._cos, self._sin = cos[0, :, :half].clone(), sin[0, :, :half].clone()

    @torch.no_grad()
    def add(self, prompts: Sequence[Sequence[int]], copies: Sequence[int]) -> Tensor:
        """Prefill each prompt once and copy its cache to its rows."""
        lengths = torch.tensor([len(p) for p in prompts])
        longest = int(lengths.max())
        if longest > DENSE_PREFILL:
            logits, fresh = self._packed_prefill(prompts, longest)
        else:
            fresh = self._empty(len(prompts), longest)
            start = torch.zeros(len(prompts), dtype=torch.long)
            logits = self._forward(_right_padded(prompts), start, fresh, lengths - 1)
        times = torch.tensor(copies)
        rows = int(times.sum())
        self._reserve(self.size + rows, longest + 1)
        new = slice(self.size, self.size + rows)
        for target, source in zip(self._cache.keys + self._cache.values, fresh.keys + fresh.values, strict=True):
            target[new, :, :longest] = source.repeat_interleave(times, 0)
        self._lengths[new] = lengths.repeat_interleave(times)
        self.size += rows
        return logits.repeat_interleave(times, 0)

    @torch.no_grad()
    def feed(self, tokens: Tensor, active: Tensor) -> Tensor:
        """One token per active row; idle rows are computed along and their slot is written over later."""
        lengths = self._lengths[: self.size]
        self._reserve(self.size, int(lengths.max()) + 1)
        window = _Cache([k[: self.size] for k in self._cache.keys], [v[: self.size] for v in self._cache.values])
        logits = self._forward(tokens[:, None], lengths, window, torch.zeros(self.size, dtype=torch.long))
        self._lengths[: self.size] += active.long()
        return logits

    @torch.no_grad()
    def feed_chunk(self, rows: Sequence[int], chunks: Sequence[Sequence[int]]) -> Tensor:
        """All tokens of a chunk in one forward; the rows' caches are copied out and back."""
        at = torch.tensor(rows)
        counts = torch.tensor([len(chunk) for chunk in chunks])
        tokens, start = _right_padded(chunks), self._lengths[at]
        end = int((start + counts).max())
        self._reserve(self.size, int(start.max()) + tokens.shape[1])
        everyone = len(rows) == self.size and list(rows) == list(range(self.size))
        part = (
            _Cache([k[: self.size] for k in self._cache.keys], [v[: self.size] for v in self._cache.values])
            if everyone
            else _Cache([k[at] for k in self._cache.keys], [v[at] for v in self._cache.values])
        )
        logits = self._forward(tokens, start, part, counts - 1)
        if not everyone:
            low = int(start.min())
            for target, source in zip(self._cache.keys + self._cache.values, part.keys + part.values, strict=True):
                target[at, :, low:end] = source[:, :, low:end]
        self._lengths[at] += counts
        return logits

    def remove(self, row: int) -> None:
        """Drop a row; the last row takes its number."""
        last = self.size - 1
        if row != last:
            length = int(self._lengths[last])
            for tensor in self._cache.keys + self._cache.values:
                tensor[row, :, :length] = tensor[last, :, :length]
            self._lengths[row] = length
        self.size = last

    def _packed_prefill(self, prompts: Sequence[Sequence[int]], longest: int) -> tuple[Tensor, _Cache]:
        """All prompts in one row through flash attention: memory linear in their length."""
        captured: dict[int, tuple[Tensor, Tensor]] = {}
        layout = make_layout([(len(prompt), ()) for prompt in prompts], captured)
        ends = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0)
        ids = torch.tensor([token for prompt in prompts for token in prompt])
        logits = packed_logits(self.model, ids, layout, ends - 1)
        fresh = self._empty(len(prompts), longest)
        for index in range(len(self._layers)):
            for target, source in zip((fresh.keys[index], fresh.values[index]), captured[index], strict=True):
                for row, (end, prompt) in enumerate(zip(ends.tolist(), prompts, strict=True)):
                    target[row, :, : len(prompt)] = source[0, :, end - len(prompt) : end]
        return logits, fresh

    def _empty(self, rows: int, capacity: int) -> _Cache:
        shape = (rows, self.kv_heads, capacity, self.head_dim)
        make = [torch.zeros(shape, dtype=self._embedding.dtype) for _ in range(2 * len(self._layers))]
        return _Cache(make[::2], make[1::2])

    def _reserve(self, rows: int, length: int) -> None:
        if length > self._cos.shape[0]:
            raise ValueError(f"sequence of {length} tokens exceeds the model's {self._cos.shape[0]} positions")
        if rows <= self._cache.rows and length <= self._cache.capacity:
            return
        old = self._cache
        rows = max(rows, old.rows if rows <= old.rows else 2 * old.rows)
        capacity = max(length, old.capacity if length <= old.capacity else 2 * old.capacity, 32)
        self._cache = self._empty(rows, capacity)
        for target, source in zip(self._cache.keys + self._cache.values, old.keys + old.values, strict=bool(old.keys)):
            target[: self.size, :, : source.shape[2]] = source[: self.size]
        lengths = torch.zeros(rows, dtype=torch.long)
        lengths[: self.size] = self._lengths[: self.size]
        self._lengths = lengths

    def _forward(self, tokens: Tensor, start: Tensor, cache: _Cache, last: Tensor) -> Tensor:
        """``tokens [rows, n]`` at positions ``start + 0…n-1``; logits ``[rows, vocabulary]`` at column ``last``."""
        rows, n = tokens.shape
        positions = start[:, None] + torch.arange(n)
        end = int(positions.max()) + 1
        positions = positions.clamp(max=self._cos.shape[0] - 1)
        keys_at = torch.arange(end)
        distance = positions[:, :, None] - keys_at
        blocked = distance < 0
        cos, sin = self._cos[positions][:, :, None], self._sin[positions][:, :, None]
        first = int(start.min())
        x = self._embedding[tokens]
        row_index = torch.arange(rows)[:, None]
        for layer, keys, values in zip(self._layers, cache.keys, cache.values, strict=True):
            q, k, v = self._project(x, layer, cos, sin)
            keys[row_index, :, positions] = k
            values[row_index, :, positions] = v
            low = 0 if layer.window is None else max(0, first - layer.window + 1)
            hidden = blocked if layer.window is None else blocked | (distance >= layer.window)
            bias = torch.zeros(hidden.shape, dtype=x.dtype).masked_fill_(hidden, BLOCKED)[:, None, None, :, low:]
            x = x + self._attend(q, keys[:, :, low:end], values[:, :, low:end], bias, layer)
            x = x + self._mix_experts(self._rms(x, layer.norm_mid).view(rows * n, -1), layer).view(rows, n, -1)
        x = x[torch.arange(rows), last]
        return F.linear(self._rms(x, self._norm), self._head)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * weight

    def _project(self, x: Tensor, layer: _Layer, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[rows, kv_heads, group, n, d]`` (scaled), keys and values ``[rows, n, kv_heads, d]``."""
        rows, n, _ = x.shape
        z = F.linear(self._rms(x, layer.norm_in), layer.qkv, layer.qkv_bias)
        z = z.view(rows, n, self.heads + 2 * self.kv_heads, self.head_dim)
        rotated, v = z[:, :, : self.heads + self.kv_heads], z[:, :, self.heads + self.kv_heads :]
        a, b = rotated.chunk(2, -1)
        qk = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        q = qk[:, :, : self.heads].reshape(rows, n, self.kv_heads, -1, self.head_dim).permute(0, 2, 3, 1, 4)
        return q * self.head_dim**-0.5, qk[:, :, self.heads :], v

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, layer: _Layer) -> Tensor:
        rows, kv, group, n, d = q.shape
        span = keys.shape[2]
        scores = torch.matmul(q.reshape(rows, kv, group * n, d), keys.transpose(2, 3)).view(rows, kv, group, n, span)
        sinks = layer.sinks.view(1, kv, group, 1, 1).expand(rows, -1, -1, n, -1)
        weights = torch.softmax(torch.cat([scores + bias, sinks], -1), -1)[..., :-1]
        out = torch.matmul(weights.reshape(rows, kv, group * n, span), values).view(rows, kv, group, n, d)
        return F.linear(out.permute(0, 3, 1, 2, 4).reshape(rows, n, -1), layer.out, layer.out_bias)

    def _mix_experts(self, x: Tensor, layer: _Layer) -> Tensor:
        """``x [tokens, hidden]``; every expert on every token, weighted by the router (0 for unchosen ones)."""
        logits = F.linear(x, layer.router, layer.router_bias)
        top, chosen = logits.topk(self.top_k, -1)
        gates = torch.zeros_like(logits).scatter_(1, chosen, top.softmax(-1))
        shared = x[None].expand(self.experts, -1, -1)
        gate = torch.baddbmm(layer.gate_bias, shared, layer.gate).clamp_(max=self._limit)
        up = torch.baddbmm(layer.up_bias, shared, layer.up).clamp_(-self._limit, self._limit)
        y = torch.baddbmm(layer.down_bias, (up + 1) * gate * torch.sigmoid(gate * self._alpha), layer.down)
        return (y * gates.t()[..., None]).sum(0)


def _right_padded(rows: Sequence[Sequence[int]]) -> Tensor:
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = torch.tensor(row)
    return tokens


def _layer(layer: Any, window: int | None) -> _Layer:
    attention, experts, router = layer.self_attn, layer.mlp.experts, layer.mlp.router
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    gate_up, gate_up_bias = experts.gate_up_proj.detach(), experts.gate_up_proj_bias.detach()[:, None]
    return _Layer(
        qkv=torch.cat([p.weight for p in projections]),
        qkv_bias=torch.cat([p.bias for p in projections]) if attention.q_proj.bias is not None else None,
        out=attention.o_proj.weight.detach(),
        out_bias=None if attention.o_proj.bias is None else attention.o_proj.bias.detach(),
        sinks=attention.sinks.detach(),
        norm_in=layer.input_layernorm.weight.detach(),
        norm_mid=layer.post_attention_layernorm.weight.detach(),
        router=router.weight.detach(),
        router_bias=router.bias.detach(),
        gate=gate_up[..., ::2].contiguous(),
        gate_bias=gate_up_bias[..., ::2].contiguous(),
        up=gate_up[..., 1::2].contiguous(),
        up_bias=gate_up_bias[..., 1::2].contiguous(),
        down=experts.down_proj.detach(),
        down_bias=experts.down_proj_bias.detach()[:, None],
        window=window,
    )
