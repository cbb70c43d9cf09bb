"""What must hold for any batch: splits, order, padding, packing, garbage under the mask, on-policy limits."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.compute.logprobs import pad_sequences, token_logprobs
from infra.compute.scores import grouped_scores
from rl.objectives.aggregation import count, token_weights
from rl.objectives.choice import policy_loss
from rl.objectives.clip import clip_bounds
from rl.objectives.config import GSPO, PPO, Aggregation, CriticFree
from rl.objectives.gspo import gspo
from rl.objectives.ppo import ppo
from rl.objectives.terms import PolicyTerms
from tests.infra.models import tiny_policy
from tests.rl.objectives import (
    AGGREGATIONS,
    CRITIC_FREE,
    MODULATED,
    OBJECTIVES,
    PLAIN,
    TOLERANCE,
    Batch,
    gradients,
    loss_of,
    random_batch,
)

SEED = st.integers(0, 2**31)
ROWS = st.integers(2, 7)
LENGTH = st.integers(1, 9)
SCALE = st.sampled_from([3e-4, 0.3])
BY_NAME = pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective.name)
FEW = settings(max_examples=20, deadline=None)


def normaliser_of(batch: Batch) -> Any:
    return count(batch.mask, 11)


@BY_NAME
@FEW
@given(SEED, ROWS, LENGTH, SCALE, st.sampled_from(AGGREGATIONS), st.data())
def test_any_split_into_micro_batches_in_any_order(
    objective: CriticFree | PPO,
    seed: int,
    rows: int,
    length: int,
    scale: float,
    aggregation: Aggregation,
    data: st.DataObject,
) -> None:
    batch = random_batch(seed, rows, length, scale).leaf()
    whole = normaliser_of(batch)
    loss = loss_of(batch, objective, aggregation, whole)
    order = data.draw(st.permutations(range(rows)))
    cuts = sorted(data.draw(st.sets(st.integers(1, rows - 1))))
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, rows], strict=True)]
    split = torch.stack([loss_of(batch.rows(part), objective, aggregation, whole) for part in parts]).sum()
    torch.testing.assert_close(split, loss, **TOLERANCE)
    for ours, theirs in zip(gradients(split, batch), gradients(loss, batch), strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


@BY_NAME
@FEW
@given(SEED, ROWS, LENGTH, SCALE, st.sampled_from(AGGREGATIONS), st.integers(0, 6), st.data())
def test_padding_and_the_place_of_tokens_in_a_row_do_not_matter(
    objective: CriticFree | PPO,
    seed: int,
    rows: int,
    length: int,
    scale: float,
    aggregation: Aggregation,
    more: int,
    data: st.DataObject,
) -> None:
    batch = random_batch(seed, rows, length, scale).leaf()
    whole = normaliser_of(batch)
    wide = length + more
    places = [sorted(data.draw(st.permutations(range(wide)))[:length]) for _ in range(rows)]
    moved = batch.columns(torch.tensor(places), wide, float("nan"))
    loss, elsewhere = (loss_of(part, objective, aggregation, whole) for part in (batch, moved))
    torch.testing.assert_close(elsewhere, loss, **TOLERANCE)
    for ours, theirs in zip(gradients(elsewhere, batch), gradients(loss, batch), strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


@BY_NAME
@FEW
@given(SEED, ROWS, LENGTH, st.sampled_from(AGGREGATIONS), st.sampled_from(["nan", "inf", "-inf", "1e30", "-7.5"]))
def test_garbage_on_tool_tokens_changes_nothing_bit_for_bit(
    objective: CriticFree | PPO, seed: int, rows: int, length: int, aggregation: Aggregation, garbage: str
) -> None:
    clean = random_batch(seed, rows, length)
    spoilt = {
        f.name: torch.where(clean.mask > 0, value, float(garbage))
        for f in fields(clean)
        if (value := getattr(clean, f.name)).dim() == 2 and f.name not in ("mask", "think")
    }
    results = []
    for batch in (clean.leaf(), replace(clean, **spoilt).leaf()):
        loss = loss_of(batch, objective, aggregation)
        results.append((loss, *gradients(loss, batch)))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
    assert not results[1][1][clean.mask == 0].any(), "a tool token has a gradient"
    assert torch.isfinite(results[1][0])


def toy_policy(seed: int, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Parameters of a softmax policy and the log-probs ``[rows, length]`` of tokens drawn by it."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(rows, length, 4, generator=generator, dtype=torch.float64)
    weights = torch.randn(4, 6, generator=generator, dtype=torch.float64).requires_grad_()
    logp = torch.log_softmax(features @ weights, -1)
    drawn = torch.multinomial(logp.detach().exp().reshape(-1, 6), 1, generator=generator).reshape(rows, length, 1)
    return weights, logp.gather(2, drawn)[..., 0]


@pytest.mark.parametrize("objective", CRITIC_FREE, ids=lambda objective: objective.name)
@FEW
@given(SEED, ROWS, LENGTH, st.sampled_from(AGGREGATIONS))
def test_on_policy_the_ratio_is_exactly_one_and_the_gradient_that_of_reinforce(
    objective: CriticFree, seed: int, rows: int, length: int, aggregation: Aggregation
) -> None:
    batch = random_batch(seed, rows, length)
    parameters, logprobs = toy_policy(seed, rows, length)
    weights = token_weights(batch.mask, aggregation, normaliser_of(batch))
    advantages = batch.outcome[:, None].expand_as(logprobs)
    terms = PolicyTerms(logprobs, logprobs.detach(), batch.mask, advantages, weights)
    result = policy_loss(terms, objective, clip_bounds(batch.outcome, batch.rms, PLAIN))
    assert torch.equal(result.ratio, torch.ones_like(result.ratio))
    assert not result.zeroed.any()
    assert not result.outside.any()
    reinforce = -(weights * advantages * batch.mask * logprobs).sum()
    (ours,) = torch.autograd.grad(result.loss, parameters, retain_graph=True)
    (theirs,) = torch.autograd.grad(reinforce, parameters)
    torch.testing.assert_close(ours, theirs, **TOLERANCE)


@BY_NAME
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_all_masked_is_exactly_zero_with_zero_gradients(objective: CriticFree | PPO, aggregation: Aggregation) -> None:
    batch = replace(random_batch(0, 3, 5), mask=torch.zeros(3, 5, dtype=torch.float64)).leaf()
    loss = loss_of(batch, objective, aggregation)
    assert loss.item() == 0.0
    assert loss.requires_grad
    for gradient in gradients(loss, batch):
        assert not gradient.any()


@pytest.mark.parametrize("objective", CRITIC_FREE, ids=lambda objective: objective.name)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_zero_variance_is_exactly_zero_with_zero_gradients(objective: CriticFree, aggregation: Aggregation) -> None:
    batch = random_batch(0, 4, 5).leaf()
    nothing = torch.zeros(4, dtype=torch.float64)
    weights = token_weights(batch.mask, aggregation, normaliser_of(batch))
    terms = PolicyTerms(batch.logprobs, batch.old, batch.mask, nothing[:, None].expand(4, 5), weights)
    result = policy_loss(terms, objective, clip_bounds(nothing, nothing, MODULATED))
    assert result.loss.item() == 0.0
    (gradient,) = torch.autograd.grad(result.loss, batch.logprobs)
    assert not gradient.any()
    assert not result.zeroed.any()


@FEW
@given(SEED, ROWS, LENGTH, st.sampled_from(AGGREGATIONS))
def test_a_wider_upper_bound_never_lowers_the_objective(
    seed: int, rows: int, length: int, aggregation: Aggregation
) -> None:
    batch = random_batch(seed, rows, length, 3e-3)
    weights = token_weights(batch.mask, aggregation, normaliser_of(batch))
    spread = batch.outcome[:, None].expand_as(batch.mask)
    terms = PolicyTerms(batch.logprobs, batch.old, batch.mask, spread, weights)
    plain, modulated = (
        gspo(terms, clip_bounds(batch.outcome, batch.rms, config)).loss.item() for config in (PLAIN, MODULATED)
    )
    assert -modulated >= -plain


@pytest.mark.parametrize("objective", OBJECTIVES[1:], ids=lambda objective: objective.name)
def test_extreme_log_ratios_of_a_token_stay_finite_in_float32(objective: CriticFree | PPO) -> None:
    """A token that the engine gave probability 0 (-inf), or almost: no overflow in token ratios.

    (The ratio of GSPO is a mean over a sequence; an infinite one is a fault, which the trainer stops at.)
    """
    old = torch.tensor([[-120.0, -1.0], [-1e4, -1.0], [float("-inf"), -1.0]])
    logprobs = torch.full((3, 2), -1.0).requires_grad_()
    values = torch.zeros(3, 2).requires_grad_()
    mask = torch.ones(3, 2)
    terms = PolicyTerms(logprobs, old, mask, torch.ones(3, 2), token_weights(mask, "token", count(mask, 2)))
    if isinstance(objective, PPO):
        loss = ppo(terms, values, values.detach(), values.detach(), objective).loss
    else:
        loss = policy_loss(terms, objective, clip_bounds(torch.ones(3), torch.ones(3), PLAIN)).loss
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()


def test_a_packed_model_pass_gives_the_loss_and_gradients_of_the_padded_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt computed once per group and no padding, against rows padded to one length: 1e-12 in float64."""
    from transformers.models.gpt_oss import modeling_gpt_oss

    def exact_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))
        return normed

    # transformers' RMSNorm computes in float32 even in a float64 model.
    monkeypatch.setattr(modeling_gpt_oss.GptOssRMSNorm, "forward", exact_norm)
    model = tiny_policy(layers=2, hidden_size=48).model.double()
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randint(0, model.config.vocab_size, (30,), generator=generator).tolist() for _ in range(7)]
    prompts = [draw[0][:5], draw[1][:12], draw[0][:5], draw[1][:12], draw[0][:5]]
    completions = [row[:length] for row, length in zip(draw[2:], (9, 1, 20, 6, 13), strict=True)]
    masks = [[int(t % 5 != 3) for t in range(len(completion))] for completion in completions]
    batch = pad_sequences(prompts, completions, masks, 0)
    mask = batch.mask.double()
    width = batch.ids.shape[1]
    shift = torch.tensor([1e-3, 1e-3, 1e-4, -1e-4, -1e-3], dtype=torch.float64)  # of the log ratio: rows 0, 4 clipped
    old = token_logprobs(model, batch).detach() - shift[:, None]
    outcome = torch.tensor([1.0, -0.5, 0.3, 0.5, -1.3], dtype=torch.float64)
    weights = token_weights(mask, "token", count(mask, width))
    results = []
    for logprobs in (
        token_logprobs(model, batch),
        grouped_scores(model, prompts, completions, width).logprobs.double(),
        grouped_scores(model, prompts[::-1], completions[::-1], width).logprobs.double().flip(0),
    ):
        terms = PolicyTerms(logprobs, old, mask, outcome[:, None].expand_as(old), weights)
        result = policy_loss(terms, GSPO(), clip_bounds(outcome, torch.ones(5), PLAIN))
        assert result.zeroed.any(1).tolist() == [True, False, False, False, True]
        model.zero_grad()
        result.loss.backward()
        results.append((result.loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}))
    for loss, grads in results[1:]:
        torch.testing.assert_close(loss, results[0][0], **TOLERANCE)
        for name, gradient in grads.items():
            torch.testing.assert_close(gradient, results[0][1][name], **TOLERANCE)


@pytest.mark.parametrize("objective", CRITIC_FREE, ids=lambda objective: objective.name)
def test_garbage_in_correction_and_advantages_under_the_mask_changes_nothing(objective: CriticFree) -> None:
    """Also where a caller made them himself, and did not zero them."""
    batch = random_batch(7, 4, 6)
    results = []
    for garbage in (0.0, float("nan"), float("inf")):
        logprobs = batch.logprobs.clone().requires_grad_()
        spread, correction = (
            torch.where(batch.mask > 0, value, garbage) for value in (batch.outcome[:, None], 1 + batch.think)
        )
        weights = token_weights(batch.mask, "gspo", normaliser_of(batch))
        terms = PolicyTerms(logprobs, batch.old, batch.mask, spread, weights, correction)
        loss = policy_loss(terms, objective, clip_bounds(batch.outcome, batch.rms, PLAIN)).loss
        results.append((loss.detach(), torch.autograd.grad(loss, logprobs)[0]))
    for loss, gradient in results[1:]:
        assert torch.equal(loss, results[0][0])
        assert torch.equal(gradient, results[0][1])
