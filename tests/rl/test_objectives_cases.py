"""Failures that people have met in public trainers, as far as pure functions can have them; and PPO's parts."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pydantic
import pytest
import torch

from infra.compute.attention.shared_prefix import SharedPrefixAttention, make_layout
from infra.compute.logprobs import pad_sequences, token_logprobs
from rl.advantages import advantages_by_group, group_advantages
from rl.objectives.aggregation import count, masked_mean, token_weights
from rl.objectives.choice import policy_loss
from rl.objectives.clip import clip_bounds
from rl.objectives.config import CorrectionConfig, KLConfig, Objective
from rl.objectives.correction import correct
from rl.objectives.entropy import entropy_bonus, entropy_from_logits
from rl.objectives.gspo import gspo
from rl.objectives.kl import kl_estimate, kl_loss, reward_penalty
from rl.objectives.ppo import Moments, gae, moments, outcome_rewards, value_loss, whiten
from rl.objectives.terms import LOG_RATIO_LIMIT, PolicyTerms
from tests.rl.objectives import CRITIC_FREE, OBJECTIVES, PLAIN, close, random_batch, tensor


def test_rl_01_equal_rewards_are_exactly_zero_and_counted() -> None:
    """RL-01: easy, hard or constant groups; the step's figure is what the zero-signal guard looks at."""
    for _ in range(5):
        advantages = group_advantages([1.0] * 4 + [0.0] * 4, 4, normalise_std=True)
        assert advantages.values == [0.0] * 8
        assert not any(advantages.keep)
        assert advantages.constant_groups / advantages.groups == 1.0


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("rewards", [[0.7], [0.7, None, None, math.nan]])
def test_rl_02_a_group_of_one_is_zero_not_nan(rewards: list[float | None], baseline: Any) -> None:
    """RL-02: one sample, or one left after filtering; neither its deviation nor its leave-one-out mean exist."""
    advantages = group_advantages(rewards, len(rewards), normalise_std=True, baseline=baseline)
    assert advantages.values == [0.0] * len(rewards)
    assert not any(advantages.keep)
    assert advantages.constant_groups == 1


def test_rl_04_groups_are_those_of_the_prompt_in_any_order() -> None:
    """RL-04: never normalised over the batch; interleaved rows; permuted rows give permuted advantages."""
    assert advantages_by_group([1.0, 1.0, 0.0, 0.0], "AABB", False).values == [0.0] * 4
    mixed = advantages_by_group([1.0, 0.0, 0.0, 1.0], "ABAB", False)
    assert mixed.values == [0.5, -0.5, -0.5, 0.5]
    rng = random.Random(0)
    rewards = [rng.random() for _ in range(12)]
    groups = [f"task {i % 3}" for i in range(12)]
    plain = advantages_by_group(rewards, groups, True)
    order = rng.sample(range(12), 12)
    permuted = advantages_by_group([rewards[i] for i in order], [groups[i] for i in order], True)
    assert permuted.values == pytest.approx([plain.values[i] for i in order], abs=1e-12)
    assert permuted.rms == pytest.approx([plain.rms[i] for i in order], abs=1e-12)


def test_rl_05_a_reward_that_is_none_is_in_no_mean_and_no_denominator() -> None:
    """RL-05: [1, None, 0, 1] has the mean 2/3 over three values."""
    advantages = group_advantages([1.0, None, 0.0, 1.0], 4, normalise_std=True)
    assert advantages.values == pytest.approx([0.5774, 0.0, -1.1547, 0.5774], abs=1e-3)
    assert advantages.keep == [True, False, True, True]
    mask = torch.ones(4, 3) * torch.tensor(advantages.keep)[:, None]
    assert (count(mask, 3).sequences, count(mask, 3).tokens) == (3, 9)


def test_rl_07_an_all_masked_micro_batch_adds_nothing() -> None:
    """RL-07: its loss is 0, backward can be called, figures are absent; the step is that of the other micro-batch."""
    logprobs = tensor([[-1.0, -0.5], [-0.3, -2.0], [-0.7, -0.1]]).requires_grad_()
    old = tensor([[-1.1, -0.5], [-0.3, -2.2], [-0.7, -0.1]])
    mask = tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    advantages = tensor([1.0, -1.0, 0.5])

    def loss(rows: list[int], normaliser: Any) -> torch.Tensor:
        weights = token_weights(mask[rows], "gspo", normaliser)
        spread = advantages[rows][:, None].expand(-1, 2)
        bounds = clip_bounds(advantages[rows], torch.ones(len(rows), dtype=torch.float64), PLAIN)
        return gspo(PolicyTerms(logprobs[rows], old[rows], mask[rows], spread, weights), bounds).loss

    empty = loss([0, 1], count(mask, 2))
    assert empty.item() == 0.0
    assert empty.requires_grad
    torch.autograd.backward(empty, retain_graph=True)
    assert logprobs.grad is not None
    assert not logprobs.grad.any()
    both = torch.autograd.grad(empty + loss([2], count(mask, 2)), logprobs)[0]
    alone = torch.autograd.grad(loss([2], count(mask[2:], 2)), logprobs)[0]
    assert torch.equal(both, alone)
    assert masked_mean(logprobs[:2], mask[:2]) is None
    assert correct(old[:2], old[:2], mask[:2], CorrectionConfig()).metrics.figures() == {}


@pytest.mark.parametrize("garbage", [(7.0, -9.0), (1e9, -1e9)])
def test_rl_11_the_sequence_ratio_sees_neither_padding_nor_the_clip_of_token_ratios(
    garbage: tuple[float, float],
) -> None:
    """RL-11: ratio 1.2214; A = +1 clipped to 1.0004 without gradient, A = -1 unclipped with gradient."""
    for advantage, objective, flows in ((1.0, 1.0004, False), (-1.0, -math.exp(0.2), True)):
        logprobs = tensor([[0.3, -0.1, 0.4, *garbage]]).requires_grad_()
        mask = tensor([[1.0, 1, 1, 0, 0]])
        terms = PolicyTerms(
            logprobs,
            torch.zeros(1, 5, dtype=torch.float64),
            mask,
            torch.full_like(mask, advantage),
            token_weights(mask, "gspo", count(mask, 5)),
        )
        result = gspo(terms, clip_bounds(tensor([advantage]), tensor([1.0]), PLAIN))
        assert result.ratio.item() == pytest.approx(1.2214, abs=1e-4)
        assert -result.loss.item() == pytest.approx(objective, abs=1e-12)
        (gradient,) = torch.autograd.grad(result.loss, logprobs)
        close(gradient[0, :3], [math.exp(0.2) / 3 if flows else 0.0] * 3)
        assert gradient[0, 3:].tolist() == [0.0, 0.0]


def test_rl_16_the_trainer_scores_at_the_sampling_temperature() -> None:
    """RL-16: logits [2, 1, 0], token 0, T = 0.5 give -0.1429, not -0.4076; the ratio to the rollout is 1."""

    def fixed(input_ids: torch.Tensor, **_: Any) -> Any:
        return SimpleNamespace(logits=tensor([2.0, 1.0, 0.0]).expand(*input_ids.shape, 3))

    batch = pad_sequences([[1]], [[0]], [[1]], 0)
    assert token_logprobs(fixed, batch, 0.5).item() == pytest.approx(-0.1429, abs=1e-4)
    assert token_logprobs(fixed, batch).item() == pytest.approx(-0.4076, abs=1e-4)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_rl_19_the_kl_estimator_never_overflows(estimator: Any) -> None:
    """RL-19: d = 0, 0.5, 100 (reference minus policy); both -inf under the mask; a reference of -inf on a token."""
    gone = float("-inf")
    logprobs = torch.tensor([[-1.0, -1.5, -101.0, gone, -2.0]]).requires_grad_()
    reference = torch.tensor([[-1.0, -1.0, -1.0, gone, gone]])
    mask = torch.tensor([[1.0, 1, 1, 0, 1]])
    estimate = kl_estimate(logprobs, reference, mask, estimator)
    assert estimate.values.dtype == torch.float32
    assert torch.isfinite(estimate.values).all()
    assert estimate.values[0, 3] == 0
    assert estimate.clamped == 2
    if estimator == "k3":
        assert estimate.values[0, :2].tolist() == pytest.approx([0, 0.148721], abs=1e-5)
        assert estimate.values[0, 2].item() == pytest.approx(math.exp(LOG_RATIO_LIMIT), rel=1e-4)
    (gradient,) = torch.autograd.grad(estimate.values.sum(), logprobs)
    assert torch.isfinite(gradient).all()
    assert gradient[0, 3] == 0
    assert gradient[0, 1] != 0
    assert torch.isfinite(reward_penalty(logprobs, reference, mask, 0.1)).all()
    if estimator != "k1":
        loss, _ = kl_loss(logprobs, reference, mask, mask, estimator, logprobs.detach() - 200)
        assert torch.isfinite(torch.autograd.grad(loss, logprobs)[0]).all()


def test_rl_21_the_outcome_sits_on_the_last_policy_token() -> None:
    """RL-21: lengths [0, 2, 3]; an empty response gets nothing, is flagged, and gives no gradient."""
    mask = tensor([[0.0, 0, 0], [1, 1, 0], [1, 1, 1]])
    placed = outcome_rewards(tensor([1.0, 0.5, -1.0]), mask)
    assert placed.values.tolist() == [[0, 0, 0], [0, 0.5, 0], [0, 0, -1.0]]
    assert placed.empty.tolist() == [True, False, False]
    assert placed.values.sum() == -0.5
    tool_last = outcome_rewards(tensor([2.0]), tensor([[1.0, 0, 1, 0, 0]]))
    assert tool_last.values.tolist() == [[0, 0, 2.0, 0, 0]]
    assert outcome_rewards(tensor([1.0]), torch.zeros(1, 0)).empty.tolist() == [True]
    values = torch.zeros(3, 3, dtype=torch.float64).requires_grad_()
    target = gae(placed.values, values, mask, 1.0, 1.0).returns
    loss = value_loss(values, values, target, mask, token_weights(mask, "token", count(mask, 3)), 0.2).loss
    assert torch.autograd.grad(loss, values)[0].ne(0).tolist() == (mask > 0).tolist()


def test_rl_23_tool_tokens_are_in_no_loss_kl_or_entropy() -> None:
    """RL-23: masked mean KL 0.2, not 16.8; an observation of 20 tokens gives its logits no gradient."""
    assert masked_mean(tensor([[0.1, 50.0, 0.3]]), tensor([[1.0, 0, 1]])) == pytest.approx(0.2, abs=1e-12)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 30, 5, generator=generator, dtype=torch.float64).requires_grad_()
    tokens = torch.randint(0, 5, (1, 30, 1), generator=generator)
    mask = torch.ones(1, 30, dtype=torch.float64)
    mask[0, 4:24] = 0
    logprobs = torch.log_softmax(logits, -1).gather(2, tokens)[..., 0]
    old = logprobs.detach() - 1e-4
    weights = token_weights(mask, "dr", count(mask, 30))
    assert count(mask, 30).tokens == 10
    terms = PolicyTerms(logprobs, old, mask, torch.ones_like(mask), weights)
    loss = (
        gspo(terms, clip_bounds(tensor([1.0]), tensor([1.0]), PLAIN)).loss
        + kl_loss(logprobs, old - 1, mask, weights, "k3")[0]
        + entropy_bonus(entropy_from_logits(logits), mask, weights, 0.01)
    )
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient[0, 4:24].eq(0).all()
    assert gradient[0].ne(0).any(-1).sum() == 10


@pytest.mark.parametrize(("sink", "weight", "output"), [(0.0, 0.4223, 1.6893), (-math.inf, 0.5, 2.0)])
def test_rl_25_the_sink_is_in_the_denominator(sink: float, weight: float, output: float) -> None:
    """RL-25: two keys with score 1, values 1 and 3."""
    one = torch.ones(1, 1, 2, 1, dtype=torch.float64)
    values = tensor([1.0, 3.0]).reshape(1, 1, 2, 1)
    layout = make_layout([(1, [1])])
    out = SharedPrefixAttention.apply(one, one, values, tensor([sink]), 1.0, layout, None)
    assert out[0, 0, 1].item() == pytest.approx(output, abs=1e-4)
    share = SharedPrefixAttention.apply(one, one, one, tensor([sink]), 1.0, layout, None)
    assert share[0, 0, 1].item() == pytest.approx(2 * weight, abs=1e-4)


def slow_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """The definition: every advantage as the sum of all deltas to come."""
    deltas = [
        reward + gamma * (values[t + 1] if t + 1 < len(values) else 0.0) - values[t] for t, reward in enumerate(rewards)
    ]
    return [sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 0.9), (0.9, 0.0)])
def test_gae_equals_its_definition_on_policy_tokens(gamma: float, lam: float) -> None:
    batch = random_batch(2, 6, 9)
    estimates = gae(batch.process, batch.values, batch.mask, gamma, lam)
    for row in range(6):
        policy = [t for t in range(9) if batch.mask[row, t] > 0]
        expected = slow_gae(batch.process[row, policy].tolist(), batch.values[row, policy].tolist(), gamma, lam)
        close(estimates.advantages[row, policy], expected)
        close(estimates.returns[row, policy], (tensor(expected) + batch.values[row, policy]).tolist())
    assert not estimates.advantages[batch.mask == 0].any()
    assert not estimates.returns[batch.mask == 0].any()


def test_without_a_critic_gae_is_the_return() -> None:
    mask = tensor([[1.0, 0, 1, 1]])
    placed = outcome_rewards(tensor([0.75]), mask)
    assert gae(placed.values, torch.zeros_like(mask), mask, 1.0, 1.0).advantages.tolist() == [[0.75, 0, 0.75, 0.75]]


def test_value_loss_is_the_worse_of_clipped_and_free() -> None:
    values = tensor([[0.5, 1.5, 0.9, 9.0]]).requires_grad_()
    old, returns, mask = tensor([[0.0, 1.0, 1.0, 0.0]]), tensor([[2.0, 1.0, 0.0, 0.0]]), tensor([[1.0, 1, 1, 0]])
    result = value_loss(values, old, returns, mask, mask, 0.2)
    # moved towards the target beyond the clip: no gradient; away from it, or within: full gradient.
    assert result.loss.item() == pytest.approx(((0.2 - 2.0) ** 2 + 0.5**2 + 0.9**2) / 2, abs=1e-12)
    assert result.clipped.tolist() == [[True, False, False, False]]
    close(torch.autograd.grad(result.loss, values)[0], [[0.0, 0.5, 0.9, 0.0]])
    batch = random_batch(8, 4, 5)

    def loss(v: torch.Tensor) -> torch.Tensor:
        return value_loss(v, batch.old_values, batch.returns, batch.mask, batch.mask, 0.2).loss

    assert torch.autograd.gradcheck(loss, batch.values.clone().requires_grad_(), eps=1e-6, atol=1e-8, rtol=0)


def test_whitening_uses_the_moments_of_the_whole_batch() -> None:
    batch = random_batch(9, 6, 7)
    whole = moments(batch.process, batch.mask)
    parts = moments(batch.process[:2], batch.mask[:2]) + moments(batch.process[2:], batch.mask[2:])
    assert parts.count == whole.count
    assert parts.total == pytest.approx(whole.total, abs=1e-12)
    white = whiten(batch.process, batch.mask, whole)
    kept = white[batch.mask > 0]
    assert kept.mean().item() == pytest.approx(0, abs=1e-12)
    assert kept.square().mean().item() == pytest.approx(1, abs=1e-12)
    assert not white[batch.mask == 0].any()
    close(
        torch.cat([whiten(batch.process[p], batch.mask[p], whole) for p in (slice(0, 2), slice(2, 6))]), white.tolist()
    )
    constant = torch.full_like(batch.process, 0.1)
    assert not whiten(constant, batch.mask, moments(constant, batch.mask)).any()
    assert not whiten(constant, batch.mask, Moments(0, 0.0, 0.0)).any()


def test_settings_name_every_objective_and_refuse_nonsense() -> None:
    adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(Objective)
    assert [adapter.validate_python({"name": o.name}) for o in OBJECTIVES if o.name in ("gspo", "gmpo", "sapo")]
    assert {o.name for o in OBJECTIVES} == {"gspo", "grpo", "cispo", "gmpo", "sapo", "dcpo", "ppo"}
    with pytest.raises(pydantic.ValidationError):
        adapter.validate_python({"name": "gspo", "low": 0.2})
    with pytest.raises(pydantic.ValidationError, match="always k1"):
        KLConfig(coefficient=0.1, place="reward", estimator="k3")
    with pytest.raises(pydantic.ValidationError, match="recompute"):
        CorrectionConfig(old_logprobs="bypass", weights="icepop")


def test_every_setting_reaches_its_objective() -> None:
    """The six losses of one off-policy batch are six different numbers."""
    batch = random_batch(6, 5, 6)
    weights = token_weights(batch.mask, "gspo", count(batch.mask, 6))
    spread = batch.outcome[:, None].expand_as(batch.mask)
    terms = PolicyTerms(batch.logprobs, batch.old, batch.mask, spread, weights)
    bounds = clip_bounds(batch.outcome, batch.rms, PLAIN)
    assert len({round(policy_loss(terms, o, bounds).loss.item(), 9) for o in CRITIC_FREE}) == len(CRITIC_FREE)
