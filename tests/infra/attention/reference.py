"""Attention with sinks as the formula says it: one softmax over all visible scores and the sink, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from infra.compute.attention.kernels import Segments


def reference(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, segments: Segments, scale: float, window: int | None
) -> Tensor:
    out = torch.zeros_like(q)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    for span in segments.spans:
        at = slice(span.start, span.stop)
        scores = q[span.row, :, at] @ k[span.row, :, at].transpose(1, 2) * scale
        distance = torch.arange(span.stop - span.start)[:, None] - torch.arange(span.stop - span.start)
        seen = (distance >= 0) & (distance < (window or span.stop))
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, scores.shape[1], 1)], -1)
        probabilities = scores.softmax(-1)[..., : distance.shape[1]]
        out = out.index_put(
            (torch.tensor(span.row), torch.arange(q.shape[1])[:, None], torch.arange(span.start, span.stop)),
            probabilities @ v[span.row, :, at],
        )
    return out


def tensors(
    batch: int, heads: int, kv_heads: int, length: int, dim: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values, sinks and a gradient of the output, float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return (
        draw(batch, heads, length, dim),
        draw(batch, kv_heads, length, dim),
        draw(batch, kv_heads, length, dim),
        draw(heads) * 2,
        draw(batch, heads, length, dim),
    )
