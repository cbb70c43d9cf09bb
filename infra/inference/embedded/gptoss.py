"""A decoder for GPT-OSS type models: fused projections, static caches, few and large matrix products.

Same numbers as ``GptOssForCausalLM`` in float32 up to rounding (checked in the tests); several times fewer
operations per decoded token. A row's numbers are the same to the last bit whatever other rows there are: sums
run in an order that depends on the row alone, and products never have fewer than ``FEWEST`` rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from infra.compute.attention.shared_prefix import make_layout, packed_logits
from infra.inference.embedded.decoder import crc
from infra.inference.embedded.gptoss_weights import LayerWeights, Weights, fuse, interleaved

BLOCKED = -1e9
DENSE_PREFILL = 128
"""Prompts up to this many tokens are prefilled as one padded batch, longer ones packed."""
FEWEST = 4
"""BLAS multiplies fewer rows than this by other kernels, which round otherwise."""


@dataclass
class _Cache:
    """Keys (rotated) and values per layer, ``[rows, kv_heads, slots, head_dim]``.

    Layers with full attention have a slot per position. Those with a sliding window have as many slots as the
    window is wide, and position ``p`` lies in slot ``p % window``.
    """

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    rows: int = 0
    capacity: int = 0
    """Positions."""


@dataclass(frozen=True)
class _Write:
    """Where new keys and values go: token ``tokens[i]`` (None: all, in order) to ``rows[i]`` and ``slots[i]``."""

    rows: Tensor
    slots: Tensor
    tokens: Tensor | None

    def __call__(self, target: Tensor, source: Tensor) -> None:
        target[self.rows, :, self.slots] = source if self.tokens is None else source[self.tokens]


@dataclass(frozen=True)
class _Reach:
    """What the layers of one kind share in a forward pass.

    ``bias`` is added to scores ``[rows, kv_heads, group, n, keys]``; None where every query sees every key.
    """

    write: _Write
    slots: int
    """Slots of the cache that are read."""
    bias: Tensor | None
    chunk: bool = False
    """The new keys follow those in the cache instead of being read from it."""


class GptOssDecoder:
    """Implements :class:`~infra.inference.embedded.decoder.ChunkDecoder`; memory grows by doubling."""

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
        self.context, self.window = config.max_position_embeddings, config.sliding_window
        self.size = 0
        self._cache = _Cache()
        self._lengths = torch.zeros(0, dtype=torch.long)
        self._weights: Weights | None = None
        self.sync()

    def sync(self) -> None:
        """Fuse the model's present weights."""
        self._without_rows()
        self._weights = fuse(self.model)
        self._shared_crc = crc(self._weights.shared())

    def sleep(self) -> None:
        """Free the fused weights and the caches."""
        self._without_rows()
        self._weights = None
        self._cache = _Cache()
        self._lengths = torch.zeros(0, dtype=torch.long)

    def checksum(self) -> int:
        """CRC-32: the model's own tensors as they were at the last sync, the fused ones as they are."""
        return crc(self.weights.copies(), self._shared_crc)

    @property
    def weights(self) -> Weights:
        """The fused weights.

        Raises:
            RuntimeError: they were freed.
        """
        if self._weights is None:
            raise RuntimeError("the decoder sleeps and has no weights: sync first")
        return self._weights

    @torch.inference_mode()
    def add(self, prompts: Sequence[Sequence[int]], copies: Sequence[int]) -> Tensor:
        """Prefill each prompt once and copy its cache to its rows."""
        lengths = torch.tensor([len(p) for p in prompts])
        longest = int(lengths.max())
        fresh = self._empty(len(prompts), longest)
        if longest > DENSE_PREFILL:
            logits = self._packed_prefill(prompts, fresh)
        else:
            start = torch.zeros(len(prompts), dtype=torch.long)
            logits = self._forward(_right_padded(prompts), start, lengths, fresh)
        times = torch.tensor(copies)
        rows = int(times.sum())
        self._reserve(self.size + rows, longest + 1)
        new = slice(self.size, self.size + rows)
        for target, source in zip(self._cache.keys + self._cache.values, fresh.keys + fresh.values, strict=True):
            target[new, :, : source.shape[2]] = source.repeat_interleave(times, 0)
        self._lengths[new] = lengths.repeat_interleave(times)
        self.size += rows
        return logits.repeat_interleave(times, 0)

    @torch.inference_mode()
    def feed(self, tokens: Tensor, active: Tensor) -> Tensor:
        """One token per active row; idle rows are computed along and their slot is written over later."""
        lengths = self._lengths[: self.size]
        self._reserve(self.size, int(lengths.max()) + 1)
        logits = self._forward(tokens[:, None], lengths, torch.ones_like(lengths), self._cache)
        self._lengths[: self.size] += active
        return logits

    @torch.inference_mode()
    def feed_chunk(self, rows: Sequence[int], chunks: Sequence[Sequence[int]]) -> Tensor:
        """All tokens of a chunk in one forward."""
        at = torch.tensor(rows)
        start, counts = self._lengths[at], torch.tensor([len(chunk) for chunk in chunks])
        self._reserve(self.size, int((start + counts).max()))
        logits = self._forward(_right_padded(chunks), start, counts, self._cache, at)
        self._lengths[at] += counts
        return logits

    @torch.inference_mode()
    def remove(self, row: int) -> None:
        """Drop a row; the last row takes its number."""
        last = self.size - 1
        if row != last:
            length = int(self._lengths[last])
            for tensor in self._cache.keys + self._cache.values:
                tensor[row, :, :length] = tensor[last, :, :length]
            self._lengths[row] = length
        self.size = last

    def _without_rows(self) -> None:
        if self.size:
            raise RuntimeError("weights changed while sequences are open: release them first")

    def _packed_prefill(self, prompts: Sequence[Sequence[int]], fresh: _Cache) -> Tensor:
        """All prompts in one row through flash attention: memory linear in their length."""
        captured: dict[int, tuple[Tensor, Tensor]] = {}
        with torch.inference_mode(mode=False), torch.no_grad():
            layout = make_layout([(len(prompt), ()) for prompt in prompts], captured)
            ends = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0)
            ids = torch.tensor([token for prompt in prompts for token in prompt])
            logits = packed_logits(self.model, ids, layout, ends - 1)
        order = interleaved(self.head_dim)
        for index, layer in enumerate(self.weights.layers):
            keys, values = captured[index][0][0, ..., order], captured[index][1][0]
            for row, (end, prompt) in enumerate(zip(ends.tolist(), prompts, strict=True)):
                first = 0 if layer.window is None else max(0, len(prompt) - layer.window)
                positions = torch.arange(first, len(prompt))
                slots = positions if layer.window is None else positions % layer.window
                fresh.keys[index][row, :, slots] = keys[:, end - len(prompt) + positions]
                fresh.values[index][row, :, slots] = values[:, end - len(prompt) + positions]
        return logits

    def _empty(self, rows: int, capacity: int) -> _Cache:
        weights = self.weights

        def make(layer: LayerWeights) -> Tensor:
            slots = capacity if layer.window is None else layer.window
            return torch.zeros((rows, self.kv_heads, slots, self.head_dim), dtype=weights.embedding.dtype)

        layers = weights.layers
        return _Cache([make(layer) for layer in layers], [make(layer) for layer in layers], rows, capacity)

    def _reserve(self, rows: int, length: int) -> None:
        if length > self.context:
            raise ValueError(f"sequence of {length} tokens exceeds the model's {self.context} positions")
        old = self._cache
        if rows <= old.rows and length <= old.capacity:
            return
        rows = max(rows, old.rows if rows <= old.rows else 2 * old.rows)
        capacity = max(length, old.capacity if length <= old.capacity else 2 * old.capacity, 32)
        self._cache = self._empty(rows, capacity)
        for target, source in zip(self._cache.keys + self._cache.values, old.keys + old.values, strict=bool(old.keys)):
            target[: self.size, :, : source.shape[2]] = source[: self.size]
        lengths = torch.zeros(rows, dtype=torch.long)
        lengths[: self.size] = self._lengths[: self.size]
        self._lengths = lengths

    def _forward(
        self, tokens: Tensor, start: Tensor, counts: Tensor, cache: _Cache, at: Tensor | None = None
    ) -> Tensor:
        """``tokens [rows, n]``, the first ``counts`` of each at positions ``start + 0 …``, the rest padding.

        Args:
            at: rows of the cache (None: its first ones).

        Returns:
            Logits ``[rows, vocabulary]`` after each row's last token.
        """
        weights = self.weights
        rows, n = tokens.shape
        positions = (start[:, None] + torch.arange(n)).clamp_(max=self.context - 1)
        end, first = int((start + counts).max()), int(start.min())
        if n == 1:
            full, sliding = self._one_token(positions[:, 0], first, end)
        else:
            full, sliding = self._many_tokens(positions, start, counts, end, at)
        turns = weights.turns[positions.view(-1), None]
        x = weights.embedding[tokens.view(-1)]
        for layer, keys, values in zip(weights.layers, cache.keys, cache.values, strict=True):
            reach = full if layer.window is None else sliding
            q, k, v = self._project(x, layer, turns, rows)
            k_all, v_all = (
                _visible(cached, new, reach, at if at is not None else rows) for cached, new in ((keys, k), (values, v))
            )
            x = x + self._attend(q, k_all, v_all, reach.bias, layer)
            x = x + self._mix_experts(_rms(x, layer.norm_mid, self.eps), layer, weights)
        x = x.view(rows, n, -1)[torch.arange(rows), counts - 1] if n > 1 else x
        return _linear(_rms(x, weights.norm, self.eps), weights.head, None)

    def _one_token(self, positions: Tensor, first: int, end: int) -> tuple[_Reach, _Reach]:
        rows = torch.arange(len(positions))
        slots = min(end, self.window)
        bias = None
        if first + 1 < end:
            bias = _bias(torch.arange(end) > positions[:, None])[:, None, None, None]
        return (
            _Reach(_Write(rows, positions, None), end, bias),
            _Reach(
                _Write(rows, positions % self.window, None),
                slots,
                None if bias is None or first + 1 >= slots else bias[..., :slots],
            ),
        )

    def _many_tokens(
        self, positions: Tensor, start: Tensor, counts: Tensor, end: int, at: Tensor | None
    ) -> tuple[_Reach, _Reach]:
        """In sliding layers the past is read before it is written over; a prefill (no ``at``) has none."""
        columns = torch.arange(positions.shape[1])
        real = columns < counts[:, None]

        def write(chosen: Tensor, slots: Tensor) -> _Write:
            row = chosen.nonzero()[:, 0]
            return _Write(row if at is None else at[row], slots[chosen], chosen.view(-1).nonzero()[:, 0])

        kept = real & (columns >= counts[:, None] - self.window)
        new = start[:, None] + columns
        if at is None:
            key_at = new
        else:
            past = start[:, None] - 1
            key_at = torch.cat([past - (past - torch.arange(self.window)) % self.window, new], 1)
        distance = positions[:, :, None] - key_at[:, None]
        unseen = (distance < 0) | (distance >= self.window) | (key_at < 0)[:, None]
        return (
            _Reach(write(real, positions), end, _bias(torch.arange(end) > positions[..., None])[:, None, None]),
            _Reach(
                write(kept, positions % self.window),
                0 if at is None else self.window,
                _bias(unseen)[:, None, None],
                chunk=True,
            ),
        )

    def _project(self, x: Tensor, layer: LayerWeights, turns: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[rows, kv_heads, group, n, d]``, keys and values ``[rows n, kv_heads, d]``."""
        z = _linear(_rms(x, layer.norm_in, self.eps), layer.qkv, layer.qkv_bias)
        z = z.view(len(x), self.heads + 2 * self.kv_heads, self.head_dim)
        rotated = self.heads + self.kv_heads
        pairs = torch.view_as_complex(z[:, :rotated].view(len(x), rotated, -1, 2))
        qk = torch.view_as_real(pairs * turns).flatten(-2)
        q = qk[:, : self.heads].view(rows, -1, self.kv_heads, self.heads // self.kv_heads, self.head_dim)
        return q.permute(0, 2, 3, 1, 4), qk[:, self.heads :], z[:, rotated:]

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, layer: LayerWeights) -> Tensor:
        """Output ``[rows n, hidden]``. The sink comes first: what follows a row's last key must not move its sums."""
        rows, kv, group, n, d = q.shape
        scores = torch.matmul(q.reshape(rows, kv, group * n, d), keys.transpose(2, 3)).view(rows, kv, group, n, -1)
        if bias is not None:
            scores += bias
        sinks = layer.sinks.view(1, kv, group, 1, 1).expand(rows, -1, -1, n, -1)
        weights = torch.softmax(torch.cat([sinks, scores], -1), -1)[..., 1:]
        out = torch.matmul(weights.reshape(rows, kv, group * n, -1), values).view(rows, kv, group, n, d)
        return _linear(out.permute(0, 3, 1, 2, 4).reshape(rows * n, -1), layer.out, layer.out_bias)

    def _mix_experts(self, x: Tensor, layer: LayerWeights, weights: Weights) -> Tensor:
        """``x [tokens, hidden]``."""
        tokens = len(x)
        if tokens < FEWEST:
            x = F.pad(x, (0, 0, 0, FEWEST - tokens))
        logits = F.linear(x, layer.router, layer.router_bias)
        top, chosen = logits.topk(self.top_k, -1)
        gates = top.softmax(-1)
        if self.experts <= 2 * self.top_k:
            gates = torch.zeros_like(logits).scatter_(1, chosen, gates)
            return _every_expert(x, gates, layer, weights)[:tokens]
        return _chosen_experts(x, gates, chosen, layer, weights)[:tokens]


def _visible(cached: Tensor, new: Tensor, reach: _Reach, rows: Tensor | int) -> Tensor:
    """Write ``new`` to the cache; what the queries see, ``[rows, kv_heads, keys, d]``."""
    if not reach.chunk:
        reach.write(cached, new)
    past = cached[:, :, : reach.slots]
    past = past[:rows] if isinstance(rows, int) else past[rows]
    if not reach.chunk:
        return past
    seen = torch.cat([past, new.view(len(past), -1, *new.shape[1:]).transpose(1, 2)], 2)
    reach.write(cached, new)
    return seen


def _every_expert(x: Tensor, gates: Tensor, layer: LayerWeights, weights: Weights) -> Tensor:
    """All experts on every token, weighted by ``gates [tokens, experts]`` (0 for those not chosen)."""
    experts = gates.shape[1]
    inner = _gated(torch.baddbmm(layer.gate_up_bias, x.expand(experts, -1, -1), layer.gate_up), weights)
    inner *= gates.t()[..., None]
    flat = inner.transpose(0, 1).reshape(len(x), -1)
    return torch.addmm(gates @ layer.down_bias, flat, layer.down.flatten(0, 1))


def _chosen_experts(x: Tensor, gates: Tensor, chosen: Tensor, layer: LayerWeights, weights: Weights) -> Tensor:
    """Each expert on the tokens that chose it; ``gates`` and ``chosen`` are ``[tokens, top_k]``."""
    order = chosen.flatten().argsort(stable=True)
    tokens = order // chosen.shape[1]
    counts = torch.bincount(chosen.flatten(), minlength=len(layer.gate_up)).tolist()
    parts = []
    for expert, part in enumerate(torch.split(x[tokens], counts)):
        if len(part):
            inner = _gated(_linear(part, layer.gate_up[expert].t(), layer.gate_up_bias[expert, 0]), weights)
            parts.append(_linear(inner, layer.down[expert].t(), layer.down_bias[expert]))
    return torch.zeros_like(x).index_add_(0, tokens, torch.cat(parts) * gates.flatten()[order, None])


def _gated(gate_up: Tensor, weights: Weights) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate.clamp(max=weights.gate_max), inplace=True).mul_(up.clamp(*weights.up_range))


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x [tokens, in]``, ``weight [out, in]``."""
    tokens = len(x)
    if tokens >= FEWEST:
        return F.linear(x, weight, bias)
    return F.linear(F.pad(x, (0, 0, 0, FEWEST - tokens)), weight, bias)[:tokens]


def _bias(blocked: Tensor) -> Tensor:
    return torch.zeros(blocked.shape).masked_fill_(blocked, BLOCKED)


def _right_padded(rows: Sequence[Sequence[int]]) -> Tensor:
    tokens = torch.zeros(len(rows), max(FEWEST, *map(len, rows)), dtype=torch.long)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = torch.tensor(row)
    return tokens
