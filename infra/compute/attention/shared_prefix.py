"""Attention of groups that share a prompt: the prompt is computed once, forward and backward.

A row holds, group after group, ``[prompt | completion 1 | … | completion G]``. A completion sees its prompt and
itself. Own and prompt attention are computed apart and merged by their log-sum-exp; the sink enters once; the
merged output and log-sum-exp, fed to each part's flash backward, give the exact gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from infra.compute.attention.segments import (
    backward_kernel,
    forward_kernel,
    lse_dtype,
    segment_backward,
    segment_forward,
)

ATTENTION = "shared_prefix"
"""Name under which transformers knows this attention."""


@dataclass(frozen=True)
class _Group:
    """One group of a row: prompt at ``start … prompt_end - 1``, completions up to ``end``.

    ``index`` ``[G, longest]`` addresses every completion token in the row (the last one repeated as padding),
    ``real`` marks those that are not padding.
    """

    start: int
    prompt_end: int
    end: int
    index: Tensor
    real: Tensor

    @property
    def equal_lengths(self) -> bool:
        return self.end - self.prompt_end == self.index.numel()

    def unpack(self, x: Tensor) -> Tensor:
        """``[1, heads, total, …]`` to ``[G, heads, longest, …]``; a view where all completions are equally long."""
        part = x[0, :, self.prompt_end : self.end] if self.equal_lengths else x[0].index_select(1, self.index.flatten())
        return part.reshape(part.shape[0], *self.index.shape, *part.shape[2:]).transpose(0, 1)

    def pack(self, x: Tensor) -> Tensor:
        """``[G, heads, longest, …]`` back to ``[heads, completion tokens, …]``."""
        flat = x.transpose(0, 1).flatten(1, 2)
        return flat if self.equal_lengths else flat[:, self.real.flatten()]


@dataclass(frozen=True)
class Layout:
    """Where everything is in a row.

    ``positions [1, total]``; completion token ``target[n]`` is predicted at ``predictor[n]`` and belongs to sequence
    ``sequence[n]``: its own predecessor, or the prompt's last position for a first token.
    """

    groups: tuple[_Group, ...]
    positions: Tensor
    predictor: Tensor
    target: Tensor
    sequence: Tensor
    sequences: int
    captured: dict[int, tuple[Tensor, Tensor]] | None = field(default=None, compare=False)
    """When given: filled with each layer's keys and values (prefill)."""


def make_layout(
    groups: Sequence[tuple[int, Sequence[int]]], captured: dict[int, tuple[Tensor, Tensor]] | None = None
) -> Layout:
    """The layout of ``[(prompt length, [completion lengths]), …]``.

    Raises:
        ValueError: an empty prompt or completion.
    """
    made: list[_Group] = []
    positions: list[Tensor] = []
    predictor: list[Tensor] = []
    target: list[Tensor] = []
    lengths: list[int] = []
    at = 0
    for prompt, completions in groups:
        if prompt < 1 or min(completions, default=1) < 1:
            raise ValueError("a group needs a prompt and completions of at least one token each")
        start, at = at, at + prompt
        positions.append(torch.arange(prompt))
        size = torch.tensor(list(completions), dtype=torch.long)
        first = at + size.cumsum(0) - size
        steps = torch.arange(int(size.max()) if completions else 0)
        real = steps < size[:, None]
        made.append(_Group(start, at, at + int(size.sum()), first[:, None] + steps.minimum(size[:, None] - 1), real))
        for begin, length in zip(first.tolist(), completions, strict=True):
            tokens = torch.arange(begin, begin + length)
            positions.append(prompt + torch.arange(length))
            target.append(tokens)
            predictor.append(torch.cat([torch.tensor([made[-1].prompt_end - 1]), tokens[:-1]]))
        lengths += list(completions)
        at = made[-1].end
    empty = torch.empty(0, dtype=torch.long)
    return Layout(
        groups=tuple(made),
        positions=torch.cat(positions)[None],
        predictor=torch.cat(predictor) if predictor else empty,
        target=torch.cat(target) if target else empty,
        sequence=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.long)),
        sequences=len(lengths),
        captured=captured,
    )


class SharedPrefixAttention(torch.autograd.Function):
    """Exact attention over a :class:`Layout`. ``q [1, heads, total, dim]``, ``k``/``v [1, kv_heads, total, dim]``."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, scale: float, layout: Layout, window: int | None
    ) -> Tensor:
        """Output like ``q``."""
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:3], dtype=lse_dtype(q.dtype))
        for group in layout.groups:
            prompt = slice(group.start, group.prompt_end)
            out[:, :, prompt], lse[:, :, prompt] = segment_forward(
                q[:, :, prompt], k[:, :, prompt], v[:, :, prompt], scale=scale, window=window
            )
            if group.end > group.prompt_end:
                own = slice(group.prompt_end, group.end)
                out[0, :, own], lse[0, :, own] = _completions_forward(q, k, v, group, scale, window)
        with_sinks = torch.logaddexp(lse, sinks.to(lse.dtype).view(1, -1, 1))
        out.mul_(torch.exp(lse - with_sinks).unsqueeze(-1))
        ctx.save_for_backward(q, k, v, sinks, out, with_sinks)
        ctx.settings = (scale, layout, window)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """``dsink_h = -sum_i P_ih rowsum(dO O)_i`` with ``P_ih = exp(sink_h - lse_i)``."""
        q, k, v, sinks, out, lse = ctx.saved_tensors
        scale, layout, window = ctx.settings
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for group in layout.groups:
            prompt = slice(group.start, group.prompt_end)
            dq[:, :, prompt], dk[:, :, prompt], dv[:, :, prompt] = segment_backward(
                *(x[:, :, prompt] for x in (grad, q, k, v, out, lse)), scale=scale, window=window
            )
            if group.end > group.prompt_end:
                _completions_backward((grad, q, k, v, out, lse), (dq, dk, dv), group, scale, window)
        share = torch.exp(sinks.to(lse.dtype).view(1, -1, 1) - lse)
        dsinks = -(share * (grad * out).sum(-1, dtype=lse.dtype)).sum((0, 2))
        return dq, dk, dv, dsinks.to(sinks.dtype), None, None, None


def _reach(group: _Group, window: int) -> tuple[int, int]:
    """How many first completion tokens still see the prompt, and how many last prompt tokens they see."""
    return min(group.index.shape[1], window - 1), min(group.prompt_end - group.start, window - 1)


def _reach_mask(queries: int, keys: int, window: int, dtype: torch.dtype) -> Tensor:
    """Completion token ``j`` sees the ``i``-th of the last ``keys`` prompt tokens if ``j + keys - i < window``."""
    distance = torch.arange(queries)[:, None] + keys - torch.arange(keys)[None]
    return torch.zeros(queries, keys, dtype=dtype).masked_fill_(distance >= window, float("-inf"))


def _merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    total = torch.logaddexp(lse, other_lse)
    return out * (lse - total).exp().unsqueeze(-1) + other * (other_lse - total).exp().unsqueeze(-1), total


def _completions_forward(
    q: Tensor, k: Tensor, v: Tensor, group: _Group, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Output ``[heads, completion tokens, dim]`` and log-sum-exp of all completions of a group, without sinks."""
    qg, kg, vg = group.unpack(q), group.unpack(k), group.unpack(v)
    prompt, own = slice(group.start, group.prompt_end), slice(group.prompt_end, group.end)
    if window is None:
        o, lse = forward_kernel(qg, kg, vg, 0.0, True, scale=scale)
        seen, seen_lse = forward_kernel(q[:, :, own], k[:, :, prompt], v[:, :, prompt], 0.0, False, scale=scale)
        return _merge(group.pack(o), group.pack(lse), seen[0], seen_lse[0])
    parts = [segment_forward(*(x[i : i + 1] for x in (qg, kg, vg)), scale=scale, window=window) for i in range(len(qg))]
    o, lse = (torch.cat(x) for x in zip(*parts, strict=True))
    queries, keys = _reach(group, window)
    if queries:
        last = slice(group.prompt_end - keys, group.prompt_end)
        kp, vp = (x[:, :, last].expand(len(qg), -1, -1, -1) for x in (k, v))
        mask = _reach_mask(queries, keys, window, q.dtype)
        seen, seen_lse = forward_kernel(qg[:, :, :queries], kp, vp, 0.0, False, attn_mask=mask, scale=scale)
        o[:, :, :queries], lse[:, :, :queries] = _merge(o[:, :, :queries], lse[:, :, :queries], seen, seen_lse)
    return group.pack(o), group.pack(lse)


def _completions_backward(
    tensors: tuple[Tensor, ...], grads: tuple[Tensor, Tensor, Tensor], group: _Group, scale: float, window: int | None
) -> None:
    """Write the completions' gradients and add to those of the prompt's keys and values."""
    grad, q, k, v, out, lse = tensors
    dq, dk, dv = grads
    prompt, own = slice(group.start, group.prompt_end), slice(group.prompt_end, group.end)
    gg, qg, kg, vg, og = (group.unpack(x) for x in (grad, q, k, v, out))
    lg = group.unpack(lse.unsqueeze(-1)).squeeze(-1)
    if not group.equal_lengths:
        gg = gg.masked_fill(~group.real[:, None, :, None], 0)  # padding repeats a query: it must not count twice
    if window is None:
        x, y, z = backward_kernel(gg, qg, kg, vg, og, lg, 0.0, True, scale=scale)
        a, b, c = backward_kernel(
            grad[:, :, own], q[:, :, own], k[:, :, prompt], v[:, :, prompt], out[:, :, own], lse[:, :, own],
            0.0, False, scale=scale,
        )  # fmt: skip
        dq[0, :, own] = group.pack(x) + a[0]
        dk[:, :, prompt] += b
        dv[:, :, prompt] += c
    else:
        parts = [
            segment_backward(*(t[i : i + 1] for t in (gg, qg, kg, vg, og, lg)), scale=scale, window=window)
            for i in range(len(qg))
        ]
        x, y, z = (torch.cat(t) for t in zip(*parts, strict=True))
        queries, keys = _reach(group, window)
        if queries:
            last, near = slice(group.prompt_end - keys, group.prompt_end), slice(0, queries)
            kp, vp = (t[:, :, last].expand(len(qg), -1, -1, -1) for t in (k, v))
            mask = _reach_mask(queries, keys, window, q.dtype)
            a, b, c = backward_kernel(
                gg[:, :, near], qg[:, :, near], kp, vp, og[:, :, near], lg[:, :, near],
                0.0, False, attn_mask=mask, scale=scale,
            )  # fmt: skip
            x[:, :, near] += a
            dk[:, :, last] += b.sum(0, keepdim=True)
            dv[:, :, last] += c.sum(0, keepdim=True)
        dq[0, :, own] = group.pack(x)
    dk[0, :, own], dv[0, :, own] = group.pack(y), group.pack(z)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    prefix_layout: Layout | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function for transformers' ``AttentionInterface``; the layout comes as ``prefix_layout=``.

    Raises:
        ValueError: there is no layout, or the model has no sinks.
    """
    if prefix_layout is None or s_aux is None:
        raise ValueError("shared-prefix attention needs prefix_layout= and a model with attention sinks")
    scale = scaling if scaling is not None else float(query.shape[-1] ** -0.5)
    if prefix_layout.captured is not None:
        prefix_layout.captured[module.layer_idx] = (key, value)
    out = SharedPrefixAttention.apply(query, key, value, s_aux, scale, prefix_layout, sliding_window)  # type: ignore[no-untyped-call]
    return out.transpose(1, 2).contiguous(), None


def register() -> None:
    """Make the attention known to transformers (again and again is fine)."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)


def supports(model: Any) -> bool:
    """Whether the model can be trained with this attention."""
    return bool(model.config.model_type == "gpt_oss")


def body(model: Any) -> Any:
    """The model without its head, adapters included."""
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    return plain.base_model


def packed_hidden(model: Any, ids: Tensor, layout: Layout, keep: Tensor) -> Tensor:
    """What goes into the head, ``[len(keep), hidden]``, at the row's positions ``keep``.

    The model's own attention is put back.
    """
    before = model.config._attn_implementation
    register()
    model.set_attn_implementation(ATTENTION)
    try:
        out: Tensor = body(model)(
            input_ids=ids[None], position_ids=layout.positions, use_cache=False, prefix_layout=layout
        ).last_hidden_state
        return out[0, keep]
    finally:
        model.set_attn_implementation(before)


def packed_logits(model: Any, ids: Tensor, layout: Layout, keep: Tensor) -> Tensor:
    """Logits ``[len(keep), vocabulary]`` at the row's positions ``keep``."""
    logits: Tensor = model.get_output_embeddings()(packed_hidden(model, ids, layout, keep))
    return logits
