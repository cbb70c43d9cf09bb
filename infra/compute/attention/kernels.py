"""Kernels of one algebra: attention without sinks and its log-sum-exp forward, gradients for any of both backward.

With ``lse' = logaddexp(lse, sink)`` the output with sinks is ``out exp(lse - lse')``; the flash backward, fed with
``(out', lse')``, gives the exact gradients of queries, keys and values (FlashAttention-2, arXiv 2307.08691:
``P = exp(S - lse')``, ``dS = P (dP - rowsum(dO out'))``). So a kernel needs to know nothing of sinks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from infra.compute.attention.segments import (
    backward_kernel,
    forward_kernel,
    lse_dtype,
    segment_backward,
    segment_forward,
)


@dataclass(frozen=True)
class Span:
    """One sequence: positions ``start … stop - 1`` of a row of the batch."""

    row: int
    start: int
    stop: int


@dataclass(frozen=True)
class Segments:
    """The sequences of a batch ``[batch, length]``; what lies outside of them is padding."""

    spans: tuple[Span, ...]
    batch: int
    length: int

    @cached_property
    def whole_rows(self) -> bool:
        """Every row is one sequence without padding."""
        return self.spans == tuple(Span(row, 0, self.length) for row in range(self.batch))


def whole(batch: int, length: int) -> Segments:
    """A batch without padding, one sequence a row."""
    return Segments(tuple(Span(row, 0, length) for row in range(batch)), batch, length)


class Kernel(Protocol):
    """Causal attention within each segment, optionally within a window; queries ``[batch, heads, length, head_dim]``.

    Keys and values may have fewer heads (grouped queries). Query ``i`` sees keys ``i - window + 1 … i``. At padding
    outputs and gradients are 0 and the log-sum-exp is any finite number.
    """

    name: str

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """Output like ``q``, and log-sum-exps (natural) ``[batch, heads, length]``."""
        ...

    def backward(
        self,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
        segments: Segments,
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values, for ``(grad, q, k, v, out, lse)``."""
        ...


class CpuKernel:
    """torch's flash attention for CPUs; windows by blocks, segment after segment."""

    name = "cpu"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """See :class:`Kernel`."""
        if segments.whole_rows and (window is None or segments.length <= window):
            out, lse = forward_kernel(q, k, v, 0.0, True, scale=scale)
            return out, lse
        out = torch.zeros_like(q)
        lse = torch.zeros(q.shape[:3], dtype=lse_dtype(q.dtype))
        for span in segments.spans:
            at = (slice(span.row, span.row + 1), slice(None), slice(span.start, span.stop))
            out[at], lse[at] = segment_forward(q[at], k[at], v[at], scale=scale, window=window)
        return out, lse

    def backward(
        self,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
        segments: Segments,
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`Kernel`."""
        if segments.whole_rows and (window is None or segments.length <= window):
            dq, dk, dv = backward_kernel(*tensors, 0.0, True, scale=scale)
            return dq, dk, dv
        grads = tuple(torch.zeros_like(x) for x in tensors[1:4])
        for span in segments.spans:
            at = (slice(span.row, span.row + 1), slice(None), slice(span.start, span.stop))
            for whole_grad, part in zip(
                grads, segment_backward(*(x[at] for x in tensors), scale=scale, window=window), strict=True
            ):
                whole_grad[at] = part
        return grads[0], grads[1], grads[2]


class EagerKernel:
    """The reference, in memory quadratic in the length: any device, any dtype."""

    name = "eager"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """See :class:`Kernel`."""
        scores = self._scores(q, k, segments, scale, window)
        lse = scores.logsumexp(-1)
        hidden = lse.isinf()
        lse = lse.masked_fill(hidden, 0.0)
        out = (scores - lse.unsqueeze(-1)).exp() @ _expand(v, q).to(scores.dtype)
        return out.to(q.dtype), lse

    def backward(
        self,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
        segments: Segments,
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`Kernel`."""
        grad, q, k, v, out, lse = tensors
        p = (self._scores(q, k, segments, scale, window) - lse.unsqueeze(-1)).exp()
        grad, wide = grad.to(p.dtype), p.dtype
        dv = p.transpose(-1, -2) @ grad
        ds = p * (grad @ _expand(v, q).to(wide).transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)) * scale
        dq = ds @ _expand(k, q).to(wide)
        dk = ds.transpose(-1, -2) @ q.to(wide)
        heads = k.shape[1]
        fold = [x.view(len(x), heads, -1, *x.shape[2:]).sum(2) for x in (dk, dv)]
        return dq.to(q.dtype), fold[0].to(k.dtype), fold[1].to(v.dtype)

    def _scores(self, q: Tensor, k: Tensor, segments: Segments, scale: float, window: int | None) -> Tensor:
        wide = lse_dtype(q.dtype)
        scores = q.to(wide) @ _expand(k, q).to(wide).transpose(-1, -2) * scale
        number = torch.full((segments.batch, segments.length), -1, device=q.device)
        for index, span in enumerate(segments.spans):
            number[span.row, span.start : span.stop] = index
        at = torch.arange(segments.length, device=q.device)
        distance = at[:, None] - at
        seen = (distance >= 0) & ((number[:, :, None] == number[:, None]) & (number[:, :, None] >= 0))
        if window is not None:
            seen &= distance < window
        return scores.masked_fill(~seen[:, None], float("-inf"))


def _expand(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)
