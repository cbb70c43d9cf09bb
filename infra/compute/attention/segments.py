"""Causal attention over one segment with CPU flash kernels, optionally within a sliding window.

Layout ``[batch, heads, length, head_dim]``; keys and values may have fewer heads (grouped queries). The log-sum-exp
(natural log) that comes back with the output lets partial results be merged and sinks be added exactly:
with ``lse' = logaddexp(lse, sink)`` the output is ``out * exp(lse - lse')``, and feeding ``(out', lse')`` to the
flash backward gives the exact gradients of queries, keys and values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

forward_kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
backward_kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Log-sum-exps are float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def segment_forward(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
    """Causal attention without sinks: output like ``q`` and log-sum-exp ``[batch, heads, length]``.

    With a window, query ``i`` sees keys ``i - window + 1 … i``; batch must be 1 then. Queries are taken in blocks of
    ``window``, each against the two key blocks it can see, so the cost is linear in the length.
    """
    length = q.shape[2]
    if window is None or length <= window:
        out, lse = forward_kernel(q, k, v, 0.0, True, scale=scale)
        return out, lse
    out = torch.empty_like(q)
    lse = torch.empty(1, q.shape[1], length, dtype=lse_dtype(q.dtype))
    blocks = _Blocks(length, window, q.dtype)
    first = slice(0, window)
    out[:, :, first], lse[:, :, first] = forward_kernel(
        q[:, :, first], k[:, :, first], v[:, :, first], 0.0, True, scale=scale
    )
    if blocks.middle:
        o, part = forward_kernel(
            blocks.queries(q), blocks.keys(k), blocks.keys(v), 0.0, False, attn_mask=blocks.mask, scale=scale
        )
        blocks.queries(out).copy_(o)
        blocks.queries(lse.unsqueeze(-1)).copy_(part.unsqueeze(-1))
    if blocks.rest:
        tail, seen = slice(blocks.end, length), slice(blocks.end - window, length)
        mask = blocks.mask[: blocks.rest, : window + blocks.rest]
        out[:, :, tail], lse[:, :, tail] = forward_kernel(
            q[:, :, tail], k[:, :, seen], v[:, :, seen], 0.0, False, attn_mask=mask, scale=scale
        )
    return out, lse


def segment_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, scale: float, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values; ``out`` and ``lse`` may already hold sinks and other partial results."""
    length = q.shape[2]
    if window is None or length <= window:
        dq, dk, dv = backward_kernel(grad, q, k, v, out, lse, 0.0, True, scale=scale)
        return dq, dk, dv
    blocks = _Blocks(length, window, q.dtype)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    first = slice(0, window)
    dq[:, :, first], a, b = backward_kernel(
        *(x[:, :, first] for x in (grad, q, k, v, out, lse)), 0.0, True, scale=scale
    )
    dk[:, :, first] += a
    dv[:, :, first] += b
    if blocks.middle:
        take = blocks.queries
        a, b, c = backward_kernel(
            take(grad), take(q), blocks.keys(k), blocks.keys(v), take(out), take(lse.unsqueeze(-1)).squeeze(-1),
            0.0, False, attn_mask=blocks.mask, scale=scale,
        )  # fmt: skip
        take(dq).copy_(a)
        blocks.add_keys(dk, b)
        blocks.add_keys(dv, c)
    if blocks.rest:
        tail, seen = slice(blocks.end, length), slice(blocks.end - window, length)
        mask = blocks.mask[: blocks.rest, : window + blocks.rest].contiguous()
        dq[:, :, tail], a, b = backward_kernel(
            grad[:, :, tail], q[:, :, tail], k[:, :, seen], v[:, :, seen], out[:, :, tail], lse[:, :, tail],
            0.0, False, attn_mask=mask, scale=scale,
        )  # fmt: skip
        dk[:, :, seen] += a
        dv[:, :, seen] += b
    return dq, dk, dv


class _Blocks:
    """A segment cut into a first block, ``middle`` full blocks, and ``rest`` positions from ``end`` on."""

    def __init__(self, length: int, window: int, dtype: torch.dtype) -> None:
        self.window = window
        self.middle = length // window - 1
        self.end = (length // window) * window
        self.rest = length - self.end
        query, key = torch.arange(window)[:, None] + window, torch.arange(2 * window)[None]
        seen = (query >= key) & (query - key < window)
        self.mask = torch.zeros(window, 2 * window, dtype=dtype).masked_fill_(~seen, float("-inf"))

    def queries(self, x: Tensor) -> Tensor:
        """The middle blocks as a batch ``[middle, heads, window, dim]`` (a view)."""
        part = x[0, :, self.window : self.end]
        return part.view(x.shape[1], self.middle, self.window, x.shape[3]).transpose(0, 1)

    def keys(self, x: Tensor) -> Tensor:
        """For each middle block the two key blocks it can see, ``[middle, heads, 2 * window, dim]`` (a view)."""
        shape = (self.middle, x.shape[1], 2 * self.window, x.shape[3])
        strides = (self.window * x.stride(2), x.stride(1), x.stride(2), x.stride(3))
        return x.as_strided(shape, strides, x.storage_offset())

    def add_keys(self, total: Tensor, part: Tensor) -> None:
        """Add gradients of :meth:`keys` back to where they came from."""
        for start, half in ((0, part[:, :, : self.window]), (self.window, part[:, :, self.window :])):
            stop = start + self.middle * self.window
            part = total[0, :, start:stop]
            part.view(total.shape[1], self.middle, self.window, total.shape[3]).add_(half.transpose(0, 1))
