"""Attention with learned sinks over padded and packed batches, exact forward and backward, linear in memory.

A sink is one learned logit per head in the denominator of the softmax, without a value (gpt-oss model card, arXiv
2508.10925): ``P_ij = exp(S_ij) / (sum_j exp(S_ij) + exp(sink_h))``. Its gradient is
``dsink_h = -sum_i exp(sink_h - lse'_i) rowsum(dO_i out'_i)``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from infra.compute.attention.choice import AnyKernel, choose
from infra.compute.attention.cuda import FlashAttn4Kernel
from infra.compute.attention.kernels import Kernel, Segments, Span, whole
from infra.errors import UsageError

ATTENTION = "sinks"
"""Name under which transformers knows this attention (it takes names with "flash" for its own hub kernels)."""


def sink_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    *,
    scale: float | None = None,
    window: int | None = None,
    segments: Segments | None = None,
    kernel: AnyKernel | None = None,
) -> Tensor:
    """Causal attention, ``[batch, heads, length, head_dim]`` like ``q``; padding is 0 and takes no gradient.

    Args:
        q: ``[batch, heads, length, head_dim]``.
        k: ``[batch, kv_heads, length, head_dim]``; ``kv_heads`` divides ``heads``.
        v: like ``k``.
        sinks: ``[heads]`` logits; -inf = no sink, +inf = the head's output is 0. None = a model without sinks.
        scale: of the logits; ``head_dim ** -0.5`` by default.
        window: query ``i`` sees keys ``i - window + 1 … i``; None = all up to ``i``.
        segments: the sequences of the batch; every row is one by default.
        kernel: what computes; the fastest that can by default.

    Raises:
        UsageError: the shapes do not fit together.
    """
    _check(q, k, v, sinks, window)
    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    segments = whole(q.shape[0], q.shape[2]) if segments is None else segments
    kernel = choose(q.device, q.dtype, q.shape[3]) if kernel is None else kernel
    if isinstance(kernel, FlashAttn4Kernel):
        return kernel.attend(q, k, v, sinks, segments, scale, window)
    return _SinkAttention.apply(q, k, v, sinks, scale, window, segments, kernel)  # type: ignore[no-any-return, no-untyped-call]


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        scale: float,
        window: int | None,
        segments: Segments,
        kernel: Kernel,
    ) -> Tensor:
        out, lse = kernel.forward(q, k, v, segments, scale, window)
        if sinks is not None:
            with_sinks = torch.logaddexp(lse, sinks.to(lse.dtype).view(1, -1, 1))
            out.mul_(torch.exp(lse - with_sinks).unsqueeze(-1))
            lse = with_sinks
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.settings = (scale, window, segments, kernel)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        scale, window, segments, kernel = ctx.settings
        dq, dk, dv = kernel.backward((grad, q, k, v, out, lse), segments, scale, window)
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            # Head by head: the product of all heads at once would be as large as the queries.
            rows = torch.stack([(grad[:, h] * out[:, h]).sum(-1, dtype=lse.dtype) for h in range(q.shape[1])], 1)
            share = torch.exp(sinks.to(lse.dtype).view(1, -1, 1) - lse)
            dsinks = -(share * rows).sum((0, 2)).where(sinks.isfinite(), 0.0).to(sinks.dtype)
        return dq, dk, dv, dsinks, None, None, None, None


def _check(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, window: int | None) -> None:
    wrong = None
    if k.shape != v.shape or q.shape[::3] != k.shape[::3] or q.dim() != 4:
        wrong = f"queries {list(q.shape)}, keys {list(k.shape)} and values {list(v.shape)} do not fit together"
    elif q.shape[2] != k.shape[2]:
        wrong = f"{q.shape[2]} queries for {k.shape[2]} keys: this attention takes whole sequences, no key/value cache"
    elif q.shape[1] % k.shape[1]:
        wrong = f"{q.shape[1]} query heads are no multiple of {k.shape[1]} key/value heads"
    elif sinks is not None and sinks.shape != (q.shape[1],):
        wrong = f"sinks {list(sinks.shape)} for {q.shape[1]} heads"
    elif window is not None and window < 1:
        wrong = f"a window of {window}"
    if wrong is not None:
        raise UsageError(
            wrong,
            where="sink attention",
            fix="call the model on whole sequences with use_cache=False; decode with eager",
        )


def read_segments(attention_mask: Tensor | None, position_ids: Tensor | None, batch: int, length: int) -> Segments:
    """The sequences of a batch: split where positions do not go on by one, without the padding.

    Args:
        attention_mask: ``[batch, length]``, 0 = padding, or None.
        position_ids: ``[batch or 1, length]``, or None = one sequence a row.

    Raises:
        UsageError: the mask has another shape, is additive, or has a hole within a sequence.
    """
    if attention_mask is None and position_ids is None:
        return whole(batch, length)
    real = torch.ones(batch, length, dtype=torch.bool)
    if attention_mask is not None:
        if attention_mask.shape != (batch, length) or attention_mask.is_floating_point():
            raise UsageError(
                f"an attention mask {list(attention_mask.shape)} of {attention_mask.dtype} cannot be read",
                where="sink attention",
                fix="give padding as [batch, length] of 0 and 1, and packed sequences by position_ids that start again",
            )
        real = attention_mask.cpu() != 0
    follows = torch.zeros(batch, length, dtype=torch.bool)
    follows[:, 1:] = True
    if position_ids is not None:
        positions = position_ids.cpu().expand(batch, length)
        follows[:, 1:] = positions[:, 1:] == positions[:, :-1] + 1
    beside = torch.zeros_like(real)
    beside[:, 1:] = real[:, :-1]
    starts = real & ~(follows & beside)
    seen_before = torch.zeros_like(real)
    seen_before[:, 1:] = real[:, :-1].int().cumsum(1) > 0
    holes = real & ~beside & follows & seen_before
    if bool(holes.any()):
        row, at = holes.nonzero()[0].tolist()
        raise UsageError(
            f"the attention mask has a hole before position {at} of row {row}",
            where="sink attention",
            fix="mask padding only, at the ends of a row; start positions anew where another sequence begins",
        )
    ends = torch.ones_like(real)
    ends[:, :-1] = ~real[:, 1:] | starts[:, 1:]
    first, last = starts.nonzero().tolist(), (real & ends).nonzero().tolist()
    spans = tuple(Span(row, start, stop + 1) for (row, start), (_, stop) in zip(first, last, strict=True))
    return Segments(spans, batch, length)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    segments: Segments | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function for transformers' ``AttentionInterface``; output ``[batch, length, heads, head_dim]``.

    ``segments=`` may be given to the model's forward; else they are read from mask and positions, layer by layer.

    Raises:
        UsageError: the sinks did not arrive, the mask cannot be read, or dropout is on.
    """
    if s_aux is None and "sinks" in dict(module.named_parameters(recurse=False)):
        raise UsageError(
            f"the sinks of layer {module.layer_idx} did not reach the attention",
            where="sink attention",
            fix="use a transformers release that passes s_aux (5.24 does)",
        )
    if dropout:
        raise UsageError(
            f"attention dropout {dropout}",
            where="sink attention",
            fix="set attention_dropout to 0 in the model's config",
        )
    if segments is None:
        segments = read_segments(attention_mask, position_ids, query.shape[0], query.shape[2])
    out = sink_attention(query, key, value, s_aux, scale=scaling, window=sliding_window, segments=segments)
    return out.transpose(1, 2).contiguous(), None


def register() -> None:
    """Make the attention known to transformers (again and again is fine)."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, _padding)


def _padding(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> Tensor | None:
    """Transformers' mask function: the padding as it came; what is causal, windowed or packed is known without it."""
    return attention_mask
