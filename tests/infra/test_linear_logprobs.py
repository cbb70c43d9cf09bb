"""Tiled log-probs and entropy against log_softmax on the whole vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from infra.compute.linear_logprobs import LogProbs, linear_logprobs

TILED = {"token_chunk": 7, "vocab_chunk": 11}


def make(
    tokens: int, vocab: int, hidden: int, dtype: torch.dtype = torch.float64, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens + vocab)
    states = torch.randn(tokens, hidden, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64) * scale
    ids = torch.randint(0, vocab, (tokens,), generator=generator)
    ids[0], ids[-1] = 0, vocab - 1
    return states.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), ids


def naive(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, temperature: float) -> LogProbs:
    logp = torch.log_softmax(hidden @ weight.T / temperature, -1)
    return LogProbs(logp.gather(1, ids[:, None])[:, 0], -(logp.exp() * logp).sum(1))


def differences(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], temperature: float, **chunks: int
) -> dict[str, float]:
    """Largest difference from the float64 reference, relative to its largest value, of values and gradients."""
    hidden, weight, ids = inputs
    reference = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = naive(*reference, ids, temperature)
    found = linear_logprobs(hidden, weight, ids, temperature, entropy=True, **chunks)
    assert found.entropy is not None
    assert expected.entropy is not None
    factors = torch.linspace(-1, 2, len(ids), dtype=torch.float64)
    (expected.logprobs * factors + expected.entropy * factors.flip(0)).sum().backward()
    (found.logprobs * factors + found.entropy * factors.flip(0)).sum().backward()
    pairs = {
        "logprobs": (found.logprobs, expected.logprobs),
        "entropy": (found.entropy, expected.entropy),
        "d_hidden": (hidden.grad, reference[0].grad),
        "d_weight": (weight.grad, reference[1].grad),
    }
    return {
        name: float((ours.detach().double() - theirs.detach()).abs().max() / theirs.detach().abs().max())  # type: ignore[union-attr]
        for name, (ours, theirs) in pairs.items()
    }


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    ("tokens", "vocab", "chunks"),
    [(20, 50, TILED), (14, 33, TILED), (3, 64, {"token_chunk": 1, "vocab_chunk": 1}), (20, 50, {})],
    ids=["ragged", "exact", "one by one", "direct"],
)
def test_values_and_gradients_equal_log_softmax(
    tokens: int, vocab: int, chunks: dict[str, int], temperature: float
) -> None:
    wrong = {k: v for k, v in differences(make(tokens, vocab, 8), temperature, **chunks).items() if not v <= 1e-12}
    assert wrong == {}


def test_float32_stays_within_1e_5_on_a_large_vocabulary() -> None:
    inputs = make(40, 50_000, 32, torch.float32, scale=0.5)
    wrong = {k: v for k, v in differences(inputs, 0.9, token_chunk=16, vocab_chunk=8192).items() if not v <= 1e-5}
    assert wrong == {}


@pytest.mark.parametrize("chunks", [{"token_chunk": 16, "vocab_chunk": 64}, {}], ids=["tiled", "direct"])
def test_half_precision_is_summed_up_in_float32(chunks: dict[str, int]) -> None:
    hidden, weight, ids = make(40, 2000, 64, torch.bfloat16)
    found = linear_logprobs(hidden, weight, ids, 1.0, entropy=True, **chunks)
    assert found.logprobs.dtype == torch.float32
    exact = naive(hidden.detach().double(), weight.detach().double(), ids, 1.0)
    in_half = naive(hidden.detach(), weight.detach(), ids, 1.0)
    assert (in_half.logprobs - exact.logprobs).abs().max() > 0.01, "half-precision sums would be seen"
    torch.testing.assert_close(found.logprobs.double(), exact.logprobs, rtol=0, atol=1e-4)
    torch.testing.assert_close(found.entropy.double(), exact.entropy, rtol=0, atol=1e-4)  # type: ignore[union-attr]
    torch.autograd.backward(found.logprobs.sum())
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("use", [lambda x: x.logprobs, lambda x: x.entropy, lambda x: x.logprobs - 0.3 * x.entropy])
def test_gradcheck(use: Callable[[LogProbs], torch.Tensor]) -> None:
    hidden, weight, ids = make(5, 9, 3)
    assert torch.autograd.gradcheck(
        lambda h, w: use(linear_logprobs(h, w, ids, 0.7, entropy=True, token_chunk=2, vocab_chunk=4)), (hidden, weight)
    )


def test_a_frozen_output_layer_gets_no_gradient_and_the_states_the_same() -> None:
    hidden, weight, ids = make(20, 50, 8)
    linear_logprobs(hidden, weight, ids, **TILED).logprobs.sum().backward()
    alone = hidden.detach().requires_grad_()
    linear_logprobs(alone, weight.detach(), ids, **TILED).logprobs.sum().backward()
    assert alone.grad is not None
    assert torch.equal(alone.grad, hidden.grad)  # type: ignore[arg-type]


class _Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple) else (out,):
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.numel())
        return out


def test_no_tensor_of_tokens_times_vocabulary_is_ever_made() -> None:
    hidden, weight, ids = make(64, 600, 4)
    with _Largest() as plain:
        naive(hidden, weight, ids, 1.0).logprobs.sum().backward()
    assert plain.elements == 64 * 600, "the check can see it"
    with _Largest() as tiled:
        found = linear_logprobs(hidden, weight, ids, 0.9, entropy=True, token_chunk=16, vocab_chunk=100)
        torch.autograd.backward(found.logprobs.sum() + found.entropy.sum())  # type: ignore[union-attr]
    assert tiled.elements == 600 * 4, "the weight's gradient is the largest, a tile has 1,600 elements"


def test_without_gradients_nothing_is_kept() -> None:
    hidden, weight, ids = make(20, 50, 8)
    kept: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, keep):
        with torch.no_grad():
            quiet = linear_logprobs(hidden, weight, ids, entropy=True, **TILED)
        assert kept == []
        assert quiet.logprobs.grad_fn is None
        linear_logprobs(hidden, weight, ids, **TILED)
        assert {x.data_ptr() for x in kept} >= {hidden.data_ptr(), weight.data_ptr()}
        assert max(x.numel() for x in kept) == weight.numel(), "inputs and one number per token"


def test_bad_inputs_are_refused() -> None:
    hidden, weight, ids = make(4, 9, 3)
    with pytest.raises(ValueError, match="do not fit"):
        linear_logprobs(hidden, weight.T, ids)
    with pytest.raises(ValueError, match="do not fit"):
        linear_logprobs(hidden, weight, ids[:-1])
    with pytest.raises(ValueError, match="vocabulary has 9"):
        linear_logprobs(hidden, weight, ids + 1)
    for temperature in (0.0, float("nan")):
        with pytest.raises(ValueError, match="temperature"):
            linear_logprobs(hidden, weight, ids, temperature)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_tensor_cores_sum_half_precision_up_in_float32() -> None:
    hidden, weight, ids = (x.detach().cuda() for x in make(40, 2000, 64, torch.bfloat16))
    exact = naive(hidden.double(), weight.double(), ids, 1.0)
    found = linear_logprobs(hidden, weight, ids, token_chunk=16, vocab_chunk=64)
    torch.testing.assert_close(found.logprobs.double(), exact.logprobs, rtol=0, atol=1e-4)
