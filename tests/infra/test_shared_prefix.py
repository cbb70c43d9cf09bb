"""Shared-prefix attention against transformers' eager attention on the sequences one by one."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from infra.compute.attention.shared_prefix import make_layout, packed_logits
from infra.compute.logprobs import pad_sequences, token_logprobs
from infra.compute.scores import grouped_scores
from tests.infra.models import tiny_policy

Groups = list[tuple[int, list[int]]]
GROUPS: list[Groups] = [
    [(40, [24] * 4)],
    [(50, [5, 40, 1, 33]), (7, [33, 21]), (16, [17] * 3)],
    [(1, [1, 2]), (70, [1])],
]


@pytest.fixture
def exact_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' RMSNorm computes in float32 even in a float64 model; without that, only rounding is left."""
    from transformers.models.gpt_oss import modeling_gpt_oss

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))
        return normed

    monkeypatch.setattr(modeling_gpt_oss.GptOssRMSNorm, "forward", forward)


def one_by_one(model: Any, ids: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Log-probs of all completion tokens, every sequence on its own through eager attention."""
    out, at = [], 0
    for prompt, completions in groups:
        begin = at + prompt
        for length in completions:
            row = torch.cat([ids[at : at + prompt], ids[begin : begin + length]])
            logits = model(row[None], use_cache=False).logits[0, prompt - 1 : -1]
            out.append(torch.log_softmax(logits, -1).gather(1, row[prompt:, None])[:, 0])
            begin += length
        at = begin
    return torch.cat(out)


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.autograd.backward(loss)
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("window", [16, 64])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 3e-5)])
def test_values_and_every_gradient_equal_eager(
    groups: Groups, window: int, dtype: torch.dtype, tolerance: float, request: pytest.FixtureRequest
) -> None:
    if dtype == torch.float64:
        request.getfixturevalue("exact_norm")
    model = tiny_policy(sliding_window=window, layers=2, hidden_size=48).model.to(dtype)
    generator = torch.Generator().manual_seed(1)
    layout = make_layout(groups)
    ids = torch.randint(0, model.config.vocab_size, (layout.positions.shape[1],), generator=generator)
    weights = torch.randn(layout.target.shape, generator=generator).to(dtype)
    reference = one_by_one(model, ids, groups)
    expected = gradients(model, (reference * weights).mean())
    logits = packed_logits(model, ids, layout, layout.predictor)
    packed = logits.log_softmax(-1).gather(1, ids[layout.target, None])[:, 0].to(dtype)
    ours = gradients(model, (packed * weights).mean())
    torch.testing.assert_close(packed, reference, rtol=0, atol=tolerance)
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
    assert expected["model.layers.0.self_attn.sinks"].abs().sum() > 0
    assert model.config._attn_implementation == "eager", "the model is left as it was"


def test_the_layout_says_who_predicts_whom() -> None:
    layout = make_layout([(3, [2, 1]), (2, [2])])
    assert layout.positions.tolist() == [[0, 1, 2, 3, 4, 3, 0, 1, 2, 3]]
    assert layout.target.tolist() == [3, 4, 5, 8, 9]
    assert layout.predictor.tolist() == [2, 3, 2, 7, 8]
    assert layout.sequence.tolist() == [0, 0, 1, 2, 2]
    assert layout.sequences == 3


def test_empty_prompts_and_completions_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        make_layout([(3, [0])])
    with pytest.raises(ValueError, match="at least one token"):
        make_layout([(0, [1])])


def test_grouped_logprobs_equal_the_padded_batch_whatever_the_order() -> None:
    model = tiny_policy().model
    rng = random.Random(0)

    def draw(length: int) -> list[int]:
        return [rng.randrange(model.config.vocab_size) for _ in range(length)]

    one, two = draw(33), draw(41)
    prompts = [one, two, one, two, one]
    completions = [draw(rng.randint(1, 30)) for _ in prompts]
    masks = [[1] * len(completion) for completion in completions]
    batch = pad_sequences(prompts, completions, masks, 0)
    weights = torch.rand(batch.mask.shape)
    plain = token_logprobs(model, batch, 0.8) * batch.mask
    grouped = grouped_scores(model, prompts, completions, batch.ids.shape[1], 0.8).logprobs
    torch.testing.assert_close(grouped, plain, rtol=0, atol=2e-5)
    expected, ours = gradients(model, (plain * weights).mean()), gradients(model, (grouped * weights).mean())
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-5)
