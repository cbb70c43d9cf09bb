"""Every kernel that runs here against the formula in float64: output and all gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from infra.compute.attention.choice import available, choose
from infra.compute.attention.cuda import pack
from infra.compute.attention.kernels import CpuKernel, EagerKernel, Kernel, Segments, Span, whole
from infra.compute.attention.sinks import sink_attention
from infra.errors import UsageError
from tests.infra.attention.reference import reference, tensors

KERNELS: list[Kernel] = [CpuKernel(), EagerKernel()]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
RAGGED = Segments((Span(0, 0, 1), Span(0, 1, 2), Span(0, 2, 19), Span(0, 19, 37)), 1, 37)
PADDED = Segments((Span(0, 0, 37), Span(1, 0, 5), Span(2, 11, 37), Span(3, 3, 20), Span(3, 20, 21)), 4, 37)


def difference(
    kernel: Kernel,
    dtype: torch.dtype,
    drawn: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    segments: Segments,
    window: int | None,
) -> float:
    """Largest absolute difference of output and gradients."""
    scale = drawn[0].shape[-1] ** -0.5
    ours = [x.clone().to(dtype).requires_grad_() for x in drawn[:4]]
    theirs = [x.clone().requires_grad_() for x in drawn[:4]]
    out = sink_attention(*ours, scale=scale, window=window, segments=segments, kernel=kernel)
    expected = reference(*theirs, segments, scale, window)
    pairs = [(out, expected)]
    out.backward(drawn[4].to(dtype))
    expected.backward(drawn[4])
    pairs += [(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True)]
    return max(float((a.detach().double() - b.detach()).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 1), (4, 2), (2, 2)])
def test_every_window_of_a_row(kernel: Kernel, dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    drawn = tensors(1, heads, kv_heads, 23, 16)
    for window in (None, *range(1, 25)):
        assert difference(kernel, dtype, drawn, whole(1, 23), window) <= TOLERANCE[dtype], window


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("segments", [RAGGED, PADDED, whole(3, 37)], ids=["ragged", "padded", "whole rows"])
def test_batches(kernel: Kernel, dtype: torch.dtype, segments: Segments) -> None:
    drawn = tensors(segments.batch, 8, 1, 37, 8)
    for window in (None, 1, 2, 7, 36, 37):
        assert difference(kernel, dtype, drawn, segments, window) <= TOLERANCE[dtype], window


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_long_rows_of_the_published_geometry(dtype: torch.dtype) -> None:
    """64 query heads on 8 key/value heads of 64, window 128, a length that is no multiple of anything."""
    drawn = tensors(1, 64, 8, 401, 64)
    for window in (None, 128):
        assert difference(CpuKernel(), dtype, drawn, whole(1, 401), window) <= TOLERANCE[dtype]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("window", [None, 3])
def test_infinite_sinks(kernel: Kernel, window: int | None) -> None:
    q, k, v, sinks, grad = tensors(1, 4, 2, 9, 8)
    sinks[1], sinks[2] = math.inf, -math.inf
    leaves = [x.requires_grad_() for x in (q, k, v, sinks)]
    out = sink_attention(*leaves, window=window, kernel=kernel)
    assert bool((out[:, 1] == 0).all()), "an infinite sink takes everything"
    plain = reference(q, k, v, None, whole(1, 9), 8**-0.5, window)
    assert float((out.detach()[:, 2] - plain[:, 2]).detach().abs().max()) <= 1e-12, "no sink at all"
    gradients = torch.autograd.grad(out, leaves, grad)
    assert all(bool(each.isfinite().all()) for each in gradients)
    assert gradients[3][1:3].tolist() == [0, 0]
    assert bool((gradients[0][:, 1] == 0).all())
    assert bool((gradients[3][[0, 3]] != 0).all())


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_padding_takes_part_in_nothing(kernel: Kernel) -> None:
    q, k, v, sinks, grad = tensors(4, 4, 2, 37, 8)
    real = torch.zeros(4, 37, dtype=torch.bool)
    for span in PADDED.spans:
        real[span.row, span.start : span.stop] = True

    def run(fill: float) -> tuple[Tensor, ...]:
        leaves = [x.masked_fill(~real[:, None, :, None], fill).requires_grad_() for x in (q, k, v)]
        out = sink_attention(*leaves, sinks, window=5, segments=PADDED, kernel=kernel)
        return out, *torch.autograd.grad(out, leaves, grad)

    for one, other in zip(run(0.0), run(1e4), strict=True):
        assert torch.equal(one, other)
        assert bool((one.transpose(1, 2)[~real] == 0).all())


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("window", [None, 2])
def test_gradcheck(kernel: Kernel, window: int | None) -> None:
    leaves = [x.requires_grad_() for x in tensors(2, 4, 2, 5, 3)[:4]]
    segments = Segments((Span(0, 0, 5), Span(1, 1, 3), Span(1, 3, 4)), 2, 5)
    assert torch.autograd.gradcheck(
        lambda q, k, v, sinks: sink_attention(q, k, v, sinks, window=window, segments=segments, kernel=kernel), leaves
    )


def test_without_sinks_it_is_plain_attention() -> None:
    q, k, v, _, _ = tensors(2, 4, 2, 11, 8)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert float((sink_attention(q, k, v, None) - expected).abs().max()) <= 1e-12


@pytest.mark.parametrize(
    ("shapes", "window", "told"),
    [
        (((1, 4, 5, 8), (1, 2, 6, 8), 4), None, "no key/value cache"),
        (((1, 4, 5, 8), (1, 3, 5, 8), 4), None, "no multiple"),
        (((1, 4, 5, 8), (1, 2, 5, 8), 3), None, "sinks .3. for 4 heads"),
        (((1, 4, 5, 8), (1, 2, 5, 6), 4), None, "do not fit together"),
        (((1, 4, 5, 8), (1, 2, 5, 8), 4), 0, "a window of 0"),
    ],
)
def test_bad_shapes(shapes: tuple[tuple[int, ...], tuple[int, ...], int], window: int | None, told: str) -> None:
    q, k, sinks = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(UsageError, match=told):
        sink_attention(q, k, k, sinks, window=window)


def test_the_choice_by_device_and_type() -> None:
    assert choose(torch.device("cpu"), torch.float32, 64).name == "cpu"
    with pytest.raises(UsageError, match="device meta"):
        choose(torch.device("meta"), torch.float32, 64)
    if not torch.cuda.is_available():
        assert choose(torch.device("cuda"), torch.bfloat16, 64).name == "eager"
        assert {each.name: each.why_not for each in available()} == {
            "flash-attn-4": "no NVIDIA GPU",
            "flash-attn-3": "no NVIDIA GPU",
            "flash-attn-2": "no NVIDIA GPU",
            "cuda": "no NVIDIA GPU",
            "cpu": None,
            "eager": None,
        }


@pytest.mark.parametrize("segments", [RAGGED, PADDED, whole(2, 37)], ids=["ragged", "padded", "whole rows"])
def test_packing_for_variable_length_kernels_is_its_own_inverse(segments: Segments) -> None:
    layout = pack(segments, torch.device("cpu"))
    q, _, _, _, _ = tensors(segments.batch, 4, 2, 37, 8)
    real = torch.zeros(segments.batch, 37, dtype=torch.bool)
    for span in segments.spans:
        real[span.row, span.start : span.stop] = True
    q = q.masked_fill(~real[:, None, :, None], 0)
    packed = layout.pack(q)
    assert packed.shape == (int(real.sum()), 4, 8)
    assert layout.offsets.diff().tolist() == [span.stop - span.start for span in segments.spans]
    first = segments.spans[-1]
    assert torch.equal(packed[layout.offsets[-2]], q[first.row, :, first.start])
    assert torch.equal(layout.unpack(packed), q)
    assert torch.equal(layout.unpack_lse(layout.pack_lse(q[..., 0])), q[..., 0])
