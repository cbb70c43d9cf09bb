"""Sequence parallelism: the ranks of the sequence axis share every sequence, for contexts no single rank can hold.

DeepSpeed-Ulysses (Jacobs et al. 2023, https://arxiv.org/abs/2309.14509): each rank holds a piece of all tokens; before
attention an all-to-all gives it all tokens of its share of the heads, afterwards another one gives the pieces back.
Each rank takes the sinks of its own heads. All else in a model works on single tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.nn.functional import all_to_all_single
from torch.nn.functional import pad

from infra.compute.attention.kernels import Segments
from infra.compute.attention.sinks import attend, read_segments
from infra.compute.sharding.mesh import SEQUENCE
from infra.errors import UsageError

ATTENTION = "sinks_over_ranks"
"""Name under which transformers knows this attention."""
_AXIS = "sequence_axis"
"""Attribute of an attention module: the ranks that share its sequences."""


@dataclass(frozen=True)
class Piece:
    """One rank's tokens of a batch ``[batch, length / ranks]``; rows are padded at the end to a multiple of ranks.

    ``targets`` are the tokens to predict, shifted before the rows were cut, so that the first token of the next rank is
    the last target of this one. ``segments`` describe the whole rows and go to the model's forward as they are.
    """

    ids: Tensor
    targets: Tensor
    positions: Tensor
    segments: Segments


def divide_sequences(model: Any, mesh: DeviceMesh) -> None:
    """Switch a model (in place) to attention over the ranks of the sequence axis; every rank must call it.

    The model then takes a :class:`Piece`: ``model(piece.ids, position_ids=piece.positions, segments=piece.segments,
    use_cache=False)``. Do it before the model is sharded.

    Args:
        mesh: from ``mesh.make_mesh``; with a sequence axis of one rank nothing happens.

    Raises:
        UsageError: the heads cannot be divided, or the model takes no other attention.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    ranks = mesh[SEQUENCE].size()
    if ranks == 1:
        return
    heads = model.config.num_key_value_heads
    if heads % ranks:
        raise UsageError(
            f"{heads} key/value heads cannot be divided among {ranks} ranks",
            where="sharding.sequence",
            fix=f"set sharding.sequence to a divisor of {heads}",
        )
    AttentionInterface.register(ATTENTION, _attend)
    AttentionMaskInterface.register(ATTENTION, _no_mask)
    try:
        model.set_attn_implementation(ATTENTION)
    except ValueError as error:
        raise UsageError(
            f"{type(model).__name__} does not take another attention: {error}",
            where="sharding.sequence",
            fix="set sharding.sequence to 1",
        ) from error
    for module in model.modules():
        if hasattr(module, "num_key_value_groups"):
            setattr(module, _AXIS, mesh[SEQUENCE])


def divide_rows(
    ids: Tensor, mesh: DeviceMesh, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
) -> Piece:
    """The piece of this rank of a batch that all ranks of the sequence axis hold alike.

    Args:
        ids: ``[batch, length]``.
        attention_mask: ``[batch, length]``, 0 = padding.
        position_ids: ``[batch or 1, length]``; they start again where another packed sequence begins.

    Raises:
        UsageError: the mask cannot be read.
    """
    batch, length = ids.shape
    missing = -length % mesh[SEQUENCE].size()
    positions = torch.arange(length, device=ids.device)[None] if position_ids is None else position_ids
    mask = torch.ones_like(ids) if attention_mask is None else attention_mask
    segments = read_segments(pad(mask, (0, missing)), pad(positions, (0, missing)), batch, length + missing)
    targets = pad(ids[:, 1:], (0, 1))
    return Piece(
        ids=own_columns(ids, mesh),
        targets=own_columns(targets, mesh),
        positions=own_columns(positions.expand(batch, length), mesh),
        segments=segments,
    )


def own_columns(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The columns of this rank, ``[batch, length / ranks, …]``, of ``x [batch, length, …]``, padded with 0."""
    axis = mesh[SEQUENCE]
    missing = -x.shape[1] % axis.size()
    wide = torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], 1) if missing else x
    return wide.chunk(axis.size(), 1)[axis.get_local_rank()].contiguous()


def all_columns(x: Tensor, mesh: DeviceMesh, length: int) -> Tensor:
    """``[batch, length]`` from every rank's ``[batch, columns]``, for what needs whole sequences, as GSPO's ratio does.

    Differentiable where every rank computes the same loss from the result: each then takes the gradient of its own
    columns, and the sum over ranks holds every token once.
    """
    whole: Tensor = _AllColumns.apply(x, mesh[SEQUENCE])  # type: ignore[no-untyped-call]
    return whole[:, :length]


class _AllColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: DeviceMesh) -> Tensor:
        ctx.axis = axis
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(axis.size())]
        distributed.all_gather(parts, x.contiguous(), group=axis.get_group())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.axis.size(), 1)[ctx.axis.get_local_rank()], None


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    s_aux: Tensor | None = None,
    segments: Segments | None = None,
    position_ids: Tensor | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """The attention function for transformers; ``[batch, columns, heads, head_dim]``.

    Raises:
        UsageError: the whole sequences are not described, or a mask was given, which cannot be right for a piece.
    """
    axis: DeviceMesh = getattr(module, _AXIS)
    if segments is None or attention_mask is not None:
        raise UsageError(
            "a piece of a sequence came without a description of the whole",
            where="sequence parallel attention",
            fix="cut the batch with divide_rows, give its segments to the model's forward, and no attention mask",
        )
    q, k, v = _heads_for_columns((query, key, value), axis)
    sinks = None if s_aux is None else s_aux.chunk(axis.size())[axis.get_local_rank()]
    out, _ = attend(module, q, k, v, None, s_aux=sinks, segments=segments, **settings)
    return _columns_for_heads(out, axis), None


def _heads_for_columns(parts: tuple[Tensor, ...], axis: DeviceMesh) -> list[Tensor]:
    """``[batch, heads, columns, dim]`` each to ``[batch, heads / ranks, length, dim]``, in one exchange."""
    ranks = axis.size()
    send = torch.cat([_by_rank(x, ranks) for x in parts], 2)
    got = _exchange(send, axis)
    whole = got.permute(1, 2, 0, 3, 4).flatten(2, 3)
    return [x.contiguous() for x in torch.split(whole, [x.shape[1] // ranks for x in parts], 1)]


def _columns_for_heads(out: Tensor, axis: DeviceMesh) -> Tensor:
    """``[batch, length, heads / ranks, dim]`` to ``[batch, columns, heads, dim]``."""
    got = _exchange(_by_rank(out, axis.size()), axis)
    return got.permute(1, 2, 0, 3, 4).flatten(2, 3).contiguous()


def _by_rank(x: Tensor, ranks: int) -> Tensor:
    """``[ranks, batch, n / ranks, …]`` from ``[batch, n, …]``."""
    return x.view(x.shape[0], ranks, x.shape[1] // ranks, *x.shape[2:]).transpose(0, 1)


def _exchange(send: Tensor, axis: DeviceMesh) -> Tensor:
    """Element ``r`` of the first axis goes to rank ``r``; the result's first axis is the rank it came from."""
    send = send.contiguous()
    got: Tensor = all_to_all_single(torch.empty_like(send), send, group=axis.get_group())  # type: ignore[no-untyped-call]
    return got


def _no_mask(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> Tensor | None:
    """Transformers' mask function: the segments say all there is to say."""
    return attention_mask
