"""Kernels for NVIDIA GPUs, over packed sequences ``[tokens, heads, head_dim]``, bfloat16 or float16.

None of them was run where this was written, for want of a GPU: ``python -m tests.gpu.check`` verifies each one that can
be used on a machine against the CPU's float64.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infra.compute.attention.kernels import Segments


@dataclass(frozen=True)
class Packed:
    """Where the tokens of all segments are: ``index [tokens]`` into ``[batch * length]``; ``offsets`` int32."""

    index: Tensor | None
    offsets: Tensor
    longest: int
    batch: int
    length: int

    def pack(self, x: Tensor) -> Tensor:
        """``[batch, heads, length, dim]`` to ``[tokens, heads, dim]``."""
        flat = x.transpose(1, 2).flatten(0, 1)
        return (flat if self.index is None else flat.index_select(0, self.index)).contiguous()

    def pack_lse(self, lse: Tensor) -> Tensor:
        """``[batch, heads, length]`` to ``[heads, tokens]``."""
        return self.pack(lse.unsqueeze(-1)).squeeze(-1).T.contiguous()

    def unpack(self, x: Tensor) -> Tensor:
        """``[tokens, heads, dim]`` to ``[batch, heads, length, dim]``, padding 0."""
        if self.index is not None:
            x = x.new_zeros(self.batch * self.length, *x.shape[1:]).index_copy_(0, self.index, x)
        return x.view(self.batch, self.length, *x.shape[1:]).transpose(1, 2).contiguous()

    def unpack_lse(self, lse: Tensor) -> Tensor:
        """``[heads, tokens]`` to ``[batch, heads, length]``, padding 0."""
        return self.unpack(lse.T.unsqueeze(-1)).squeeze(-1)


def pack(segments: Segments, device: torch.device) -> Packed:
    """The layout of a batch for variable-length kernels."""
    sizes = [span.stop - span.start for span in segments.spans]
    offsets = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    index = None
    if sum(sizes) < segments.batch * segments.length:
        base = [span.row * segments.length for span in segments.spans]
        index = torch.cat(
            [torch.arange(b + s.start, b + s.stop) for b, s in zip(base, segments.spans, strict=True)]
        ).to(device)
    return Packed(index, offsets, max(sizes, default=0), segments.batch, segments.length)


class _Varlen:
    """A flash kernel that takes packed sequences; subclasses call one library."""

    name = ""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """See :class:`infra.compute.attention.kernels.Kernel`."""
        layout = pack(segments, q.device)
        left = -1 if window is None else window - 1
        out, lse = self._forward(layout.pack(q), layout.pack(k), layout.pack(v), layout, scale, left)
        return layout.unpack(out), layout.unpack_lse(lse)

    def backward(
        self,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
        segments: Segments,
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`infra.compute.attention.kernels.Kernel`."""
        layout = pack(segments, tensors[0].device)
        packed = [layout.pack(x) for x in tensors[:5]]
        left = -1 if window is None else window - 1
        dq, dk, dv = self._backward(packed, layout.pack_lse(tensors[5]), layout, scale, left)
        return layout.unpack(dq), layout.unpack(dk), layout.unpack(dv)

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Packed, scale: float, left: int
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _backward(
        self, packed: list[Tensor], lse: Tensor, layout: Packed, scale: float, left: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError


class AtenKernel(_Varlen):
    """The FlashAttention-2 kernels that torch brings along."""

    name = "cuda"

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Packed, scale: float, left: int
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, layout.offsets, layout.offsets, layout.longest, layout.longest, 0.0, left < 0, False,
            scale=scale, window_size_left=None if left < 0 else left, window_size_right=None if left < 0 else 0,
        )  # fmt: skip
        return out, lse

    def _backward(
        self, packed: list[Tensor], lse: Tensor, layout: Packed, scale: float, left: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad, q, k, v, out = packed
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # state of a dropout that does not take place
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse, layout.offsets, layout.offsets, layout.longest, layout.longest, 0.0, left < 0,
            unused, torch.empty(0, device=q.device),
            scale=scale, window_size_left=None if left < 0 else left, window_size_right=None if left < 0 else 0,
        )  # fmt: skip
        return dq, dk, dv


class FlashAttn2Kernel(_Varlen):
    """The package ``flash-attn``, release 2."""

    name = "flash-attn-2"

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Packed, scale: float, left: int
    ) -> tuple[Tensor, Tensor]:
        library: Any = importlib.import_module("flash_attn.flash_attn_interface")
        out, lse, *_ = library._flash_attn_varlen_forward(
            q, k, v, layout.offsets, layout.offsets, layout.longest, layout.longest,
            dropout_p=0.0, softmax_scale=scale, causal=True, window_size_left=left, window_size_right=0,
        )  # fmt: skip
        return out, lse

    def _backward(
        self, packed: list[Tensor], lse: Tensor, layout: Packed, scale: float, left: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        library: Any = importlib.import_module("flash_attn.flash_attn_interface")
        grad, q, k, v, out = packed
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        library._flash_attn_varlen_backward(
            grad, q, k, v, out, lse, dq, dk, dv, layout.offsets, layout.offsets, layout.longest, layout.longest,
            dropout_p=0.0, softmax_scale=scale, causal=True, window_size_left=left, window_size_right=0,
            softcap=0.0, alibi_slopes=None, deterministic=False, rng_state=None,
        )  # fmt: skip
        return dq, dk, dv


class FlashAttn3Kernel(_Varlen):
    """FlashAttention-3 (the repository's ``hopper`` folder, module ``flash_attn_interface``), SM90."""

    name = "flash-attn-3"

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Packed, scale: float, left: int
    ) -> tuple[Tensor, Tensor]:
        library: Any = importlib.import_module("flash_attn_interface")
        out, lse, *_ = library._flash_attn_forward(
            q, k, v, cu_seqlens_q=layout.offsets, cu_seqlens_k=layout.offsets, max_seqlen_q=layout.longest,
            max_seqlen_k=layout.longest, softmax_scale=scale, causal=True, window_size_left=left, window_size_right=0,
        )  # fmt: skip
        return out, lse

    def _backward(
        self, packed: list[Tensor], lse: Tensor, layout: Packed, scale: float, left: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        library: Any = importlib.import_module("flash_attn_interface")
        grad, q, k, v, out = packed
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        library._flash_attn_backward(
            grad, q, k, v, out, lse, cu_seqlens_q=layout.offsets, cu_seqlens_k=layout.offsets,
            max_seqlen_q=layout.longest, max_seqlen_k=layout.longest, dq=dq, dk=dk, dv=dv, softmax_scale=scale,
            is_causal=True, window_size_left=left, window_size_right=0,
        )  # fmt: skip
        return dq, dk, dv


class FlashAttn4Kernel:
    """The package ``flash-attn-4`` (``flash_attn.cute``), SM90 and SM100: sinks within the kernel, its own backward."""

    name = "flash-attn-4"

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        segments: Segments,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Differentiable output like ``q``."""
        library: Any = importlib.import_module("flash_attn.cute")
        layout = pack(segments, q.device)
        out = library.flash_attn_varlen_func(
            *map(layout.pack, (q, k, v)), cu_seqlens_q=layout.offsets, cu_seqlens_k=layout.offsets,
            max_seqlen_q=layout.longest, max_seqlen_k=layout.longest, softmax_scale=scale, causal=True,
            window_size=(None if window is None else window - 1, None if window is None else 0),
            learnable_sink=None if sinks is None else sinks.to(q.dtype),
        )  # fmt: skip
        return layout.unpack(out[0] if isinstance(out, tuple) else out)


@dataclass(frozen=True)
class Candidate:
    """A kernel, and what it needs."""

    make: type[_Varlen] | type[FlashAttn4Kernel]
    module: str | None
    """The Python module that brings it; None = torch itself."""
    capabilities: tuple[int, ...] | None = None
    """Major compute capabilities it is built for; None = 8 and above."""

    def why_not(self) -> str | None:
        """Why it cannot be used on this machine, or None."""
        if not torch.cuda.is_available():
            return "no NVIDIA GPU"
        major = torch.cuda.get_device_capability()[0]
        if major < 8 or (self.capabilities is not None and major not in self.capabilities):
            return f"not built for compute capability {major}.x"
        if self.module is not None and not _importable(self.module):
            return f"the Python module {self.module} is not installed"
        return None


CANDIDATES = (
    Candidate(FlashAttn4Kernel, "flash_attn.cute", (9, 10)),
    Candidate(FlashAttn3Kernel, "flash_attn_interface", (9,)),
    Candidate(FlashAttn2Kernel, "flash_attn.flash_attn_interface"),
    Candidate(AtenKernel, None),
)
"""The fastest first."""


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
