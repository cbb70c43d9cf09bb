"""Checks every CUDA kernel against float64 on the CPU, then prints speed and memory: ``python -m tests.gpu.check``.

Not run on a GPU yet. Covered are each attention kernel that can be used on the machine, sorted experts and linear
log-probs, outputs and all gradients. Takes less than five minutes. Exit code 0 = all agree, 1 = one does not or raised,
2 = no GPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from infra.compute.attention.choice import AnyKernel
from infra.compute.attention.cuda import CANDIDATES
from infra.compute.attention.kernels import EagerKernel, Segments, Span, whole
from infra.compute.attention.sinks import sink_attention
from infra.compute.experts import ExpertWeights, sorted_experts
from infra.compute.linear_logprobs import linear_logprobs
from tests.infra.attention.reference import reference, tensors

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Largest difference of a tensor, relative to its largest entry; about twice what the CPU's own kernels show."""
DEVICE = "cuda"
LENGTH = 401
BATCHES = {
    "whole rows": whole(2, LENGTH),
    "packed": Segments((Span(0, 0, 1), Span(0, 1, 140), Span(0, 140, LENGTH)), 1, LENGTH),
    "padded": Segments((Span(0, 0, LENGTH), Span(1, 60, 300)), 2, LENGTH),
}
CONTEXTS = (4096, 16384, 65536, 131072)
EAGER_CONTEXT = 4096
VOCABULARY, HIDDEN = 201_088, 2880
Case = tuple[str, Callable[[], dict[str, tuple[Tensor, Tensor]]], float]
"""Name, pairs of (found, expected) by the name of the tensor, tolerance."""


def kernels() -> list[AnyKernel]:
    """Every kernel that can be used here."""
    return [*(each.make() for each in CANDIDATES if each.why_not() is None), EagerKernel()]


def rounded(drawn: Sequence[Tensor], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """The same values twice: on the GPU in ``dtype``, and on the CPU in float64; both take gradients."""
    here = [x.to(dtype).double().requires_grad_() for x in drawn]
    return [x.detach().to(DEVICE, dtype).requires_grad_() for x in here], here


def pairs(
    out: Tensor, expected: Tensor, found: Sequence[Tensor], exact: Sequence[Tensor], grad: Tensor, names: str
) -> dict[str, tuple[Tensor, Tensor]]:
    """Outputs and the gradients for ``grad``; ``names`` of the inputs in their order."""
    grad = grad.to(out.dtype).double()
    mine = torch.autograd.grad(out, found, grad.to(out.device, out.dtype))
    theirs = torch.autograd.grad(expected, exact, grad)
    return {"out": (out, expected)} | {
        f"d_{name}": pair for name, pair in zip(names.split(), zip(mine, theirs, strict=True), strict=True)
    }


def attention_case(kernel: AnyKernel, dtype: torch.dtype, batch: str, window: int | None) -> Case:
    """A kernel on grouped queries of head size 64."""

    def run() -> dict[str, tuple[Tensor, Tensor]]:
        segments = BATCHES[batch]
        *drawn, grad = tensors(segments.batch, 8, 2, LENGTH, 64)
        found, exact = rounded(drawn, dtype)
        out = sink_attention(*found, window=window, segments=segments, kernel=kernel)
        return pairs(out, reference(*exact, segments, 64**-0.5, window), found, exact, grad, "q k v sinks")

    return f"attention {kernel.name}, {batch}, window {window}, {dtype}", run, TOLERANCE[dtype]


def experts_case(dtype: torch.dtype) -> Case:
    """Sorted experts against transformers' eager ones."""

    def run() -> dict[str, tuple[Tensor, Tensor]]:
        from transformers import GptOssConfig
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

        config = GptOssConfig(hidden_size=64, intermediate_size=48, num_local_experts=8)
        config._experts_implementation = "eager"
        made = GptOssExperts(config)
        # Rounded to bfloat16, values near the gate's limit would fall on its other side, where the gradient is 0.
        size = 0.3 if dtype == torch.float32 else 0.1
        draw = torch.Generator().manual_seed(0)
        best = torch.randn(300, 7, generator=draw).topk(4, -1)
        shapes = [(300, 64), *(parameter.shape for parameter in made.parameters())]
        values = [torch.randn(shape, generator=draw) * (size if i else 1) for i, shape in enumerate(shapes)]
        found, exact = rounded([*values, best.values.softmax(-1)], dtype)
        hidden, *weights, routing = found
        out = sorted_experts(
            hidden, best.indices.to(DEVICE), routing, ExpertWeights(*weights, made.alpha, made.limit), block=64
        )
        parameters = dict(zip((name for name, _ in made.named_parameters()), exact[1:-1], strict=True))
        expected = torch.func.functional_call(made, parameters, (exact[0], best.indices, exact[-1]))
        names = f"hidden {' '.join(parameters)} routing"
        return pairs(out, expected, found, exact, torch.randn(300, 64, generator=draw), names)

    return f"sorted experts, {dtype}", run, TOLERANCE[dtype]


def logprobs_case(dtype: torch.dtype) -> Case:
    """Log-probs and entropy in many tiles against the softmax of all logits."""

    def run() -> dict[str, tuple[Tensor, Tensor]]:
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(2000, (300,), generator=draw)
        drawn = [torch.randn(300, 64, generator=draw), torch.randn(2000, 64, generator=draw) * 0.2]
        found, exact = rounded(drawn, dtype)
        ours = linear_logprobs(*found, ids.to(DEVICE), 0.7, entropy=True, token_chunk=128, vocab_chunk=512)
        assert ours.entropy is not None
        logp = (exact[0] @ exact[1].T / 0.7).log_softmax(1)
        expected = torch.stack([logp.gather(1, ids[:, None])[:, 0], -(logp.exp() * logp).sum(1)])
        grad = torch.randn(2, 300, generator=draw)
        return pairs(torch.stack([ours.logprobs, ours.entropy]), expected, found, exact, grad, "hidden weight")

    return f"linear log-probs, {dtype}", run, TOLERANCE[dtype]


def cases() -> list[Case]:
    """All checks."""
    made = []
    for kernel in kernels():
        eager = isinstance(kernel, EagerKernel)
        for dtype in (torch.float32, torch.bfloat16) if eager else (torch.bfloat16, torch.float16):
            made += [attention_case(kernel, dtype, batch, window) for batch in BATCHES for window in (None, 1, 128)]
    for dtype in (torch.float32, torch.bfloat16):
        made += [experts_case(dtype), logprobs_case(dtype)]
    return made


def check(case: Case) -> bool:
    """Run one check and print its largest relative difference."""
    name, run, tolerance = case
    try:
        found = run()
        off = {key: distance(*pair) for key, pair in found.items()}
    except Exception as error:  # one library that does not work must not hide the others
        print(f"FAILED {name}: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)
        return False
    worst = max(off, key=lambda key: float("inf") if off[key] != off[key] else off[key])
    good = off[worst] <= tolerance
    print(f"{'ok    ' if good else 'FAILED'} {name}: {worst} off by {off[worst]:.1e} of {tolerance:.0e}", flush=True)
    return good


def distance(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest entry."""
    exact = expected.detach()
    return float((found.detach().cpu().double() - exact).abs().max() / exact.abs().max())


def measure(name: str, tokens: int, step: Callable[[], Any]) -> None:
    """Print a line of the table: the better of two runs after one that warms up."""
    seconds = []
    try:
        for _ in range(3):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            step()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        peak = (torch.cuda.max_memory_allocated() - before) / 1e9
        print(f"{name:26} {tokens:8} {tokens / min(seconds[1:]):14,.0f} {peak:9.2f}", flush=True)
    except torch.cuda.OutOfMemoryError:
        print(f"{name:26} {tokens:8} does not fit", flush=True)
    except Exception as error:  # the checks above have told what does not work
        print(f"{name:26} {tokens:8} {type(error).__name__}", flush=True)
    torch.cuda.empty_cache()


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    """Normal random numbers on the GPU, bfloat16, that take a gradient."""
    return (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) * scale).requires_grad_()


def measure_attention(kernel: AnyKernel, tokens: int) -> None:
    """GPT-OSS's heads over the whole context, forward and backward."""
    try:
        leaves = [draw(1, heads, tokens, 64) for heads in (64, 8, 8)] + [draw(64)]
        grad = draw(1, 64, tokens, 64).detach()
    except torch.cuda.OutOfMemoryError:
        print(f"{'attention ' + kernel.name:26} {tokens:8} does not fit", flush=True)
        return
    measure(
        f"attention {kernel.name}", tokens,
        lambda: torch.autograd.grad(sink_attention(*leaves, kernel=kernel), leaves, grad),
    )  # fmt: skip


def table() -> None:
    """Tokens per second and peak memory, forward and backward, bfloat16."""
    print(f"\n{'bfloat16, both passes':26} {'tokens':>8} {'tokens/s':>14} {'peak GB':>9}")
    for kernel in kernels():
        for tokens in CONTEXTS:
            if tokens <= EAGER_CONTEXT or not isinstance(kernel, EagerKernel):
                measure_attention(kernel, tokens)
    for tokens in CONTEXTS[:2]:
        measure_experts(tokens)
        measure_logprobs(tokens)


def measure_experts(tokens: int) -> None:
    """An expert layer of GPT-OSS 20B."""
    weights = [
        draw(32, HIDDEN, 2 * HIDDEN, scale=0.02), draw(32, 2 * HIDDEN), draw(32, HIDDEN, HIDDEN, scale=0.02),
        draw(32, HIDDEN),
    ]  # fmt: skip
    best = torch.randn(tokens, 32, device=DEVICE).topk(4, -1)
    leaves = [draw(tokens, HIDDEN), best.values.softmax(-1).bfloat16().requires_grad_(), *weights]

    def step() -> None:
        out = sorted_experts(leaves[0], best.indices, leaves[1], ExpertWeights(*weights, 1.702, 7.0))
        torch.autograd.grad(out, leaves, torch.ones_like(out))

    measure("sorted experts", tokens, step)


def measure_logprobs(tokens: int) -> None:
    """The output layer of GPT-OSS."""
    leaves = [draw(tokens, HIDDEN), draw(VOCABULARY, HIDDEN, scale=HIDDEN**-0.5)]
    ids = torch.randint(VOCABULARY, (tokens,), device=DEVICE)
    measure(
        "linear log-probs", tokens, lambda: torch.autograd.grad(linear_logprobs(*leaves, ids).logprobs.sum(), leaves)
    )


def main() -> int:
    """Exit code; see the module."""
    if not torch.cuda.is_available():
        print("There is no NVIDIA GPU here, so nothing was checked.", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for candidate in CANDIDATES:
        if candidate.why_not() is not None:
            print(f"left out: {candidate.make.name}, {candidate.why_not()}")
    results = [check(case) for case in cases()]
    table()
    print(f"\n{sum(results)} of {len(results)} checks agree")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
