"""The objective against independent float64 oracles (values and finite-difference gradients)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rl.advantages import group_advantages
from rl.config import ClipConfig
from rl.objectives.aggregation import Normaliser, token_weights
from rl.objectives.clip import clip_bounds
from rl.objectives.gspo import GSPOResult, PolicyTerms, gspo

ORACLES = {
    case["name"]: case
    for case in json.loads((Path(__file__).parents[1] / "oracles" / "gspo_oracles.json").read_text())["cases"]
}
PLAIN = ClipConfig(low=3e-4, high=4e-4, modulation_high=0)
MODULATED = ClipConfig(low=3e-4, high=4e-4, modulation_high=1.0)
TOLERANCE = {"rtol": 0.0, "atol": 1e-12}


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def evaluate(
    inputs: dict[str, Any],
    clip: ClipConfig = PLAIN,
    aggregation: Any = "gspo",
    keep: list[bool] | None = None,
    rms: float | None = None,
) -> tuple[GSPOResult, torch.Tensor]:
    """Loss and gradient of a case; ``keep`` names the rows that count."""
    logprobs = tensor(inputs["logp"]).requires_grad_()
    mask = tensor(inputs["mask"])
    if keep is not None:
        mask = mask * tensor(keep)[:, None]
    sequence_advantages = tensor(inputs.get("advantage", [0.0] * len(mask)))
    advantages = (
        tensor(inputs["token_advantage"])
        if "token_advantage" in inputs
        else sequence_advantages[:, None].expand_as(logprobs)
    )
    counted = int((mask.sum(-1) > 0).sum())
    normaliser = Normaliser(counted, int(mask.sum()), inputs.get("L_max", 1))
    group_rms = torch.full_like(sequence_advantages, rms if rms is not None else 1.0)
    terms = PolicyTerms(
        logprobs, tensor(inputs["old_logp"]), mask, advantages, token_weights(mask, aggregation, normaliser)
    )
    result = gspo(terms, clip_bounds(sequence_advantages, group_rms, clip))
    (gradient,) = torch.autograd.grad(result.loss, logprobs)
    return result, gradient


def check(result: GSPOResult, gradient: torch.Tensor, expected: dict[str, Any]) -> None:
    torch.testing.assert_close(result.loss.detach(), tensor(expected["loss"]), **TOLERANCE)
    torch.testing.assert_close(gradient, tensor(expected["grad_logp"]), **TOLERANCE)


@pytest.mark.parametrize("name", ["gspo_basic", "gspo_four_quadrants", "gspo_token_per_token_advantage"])
def test_loss_and_gradient_match_the_oracle(name: str) -> None:
    case = ORACLES[name]
    result, gradient = evaluate(case["inputs"])
    check(result, gradient, case["expected"])
    torch.testing.assert_close(result.ratio, tensor(case["expected"]["seq_ratio"]), **TOLERANCE)


def test_four_quadrants_lose_their_gradient_by_the_sign_of_the_advantage() -> None:
    case = ORACLES["gspo_four_quadrants"]
    result, _ = evaluate(case["inputs"])
    assert result.zeroed.any(1).tolist() == case["expected"]["clip_active"]
    assert result.outside.any(1).tolist() == case["expected"]["ratio_outside_band"]


def test_tool_tokens_do_not_enter_ratio_or_gradient() -> None:
    case = ORACLES["gspo_tool_tokens_masked"]
    result, gradient = evaluate(case["inputs"])
    check(result, gradient, case["expected"])
    garbage = json.loads(json.dumps(case["inputs"]))
    for row, mask in enumerate(garbage["mask"]):
        for column, policy in enumerate(mask):
            if not policy:
                garbage["logp"][row][column] = float("nan")
    changed, changed_gradient = evaluate(garbage)
    assert torch.equal(changed.loss, result.loss)
    assert torch.equal(changed_gradient, gradient)


def test_on_policy_ratio_is_exactly_one() -> None:
    case = ORACLES["on_policy_ratio_exactly_one"]
    result, gradient = evaluate(case["inputs"])
    assert result.ratio.tolist() == [1.0, 1.0]
    assert not result.outside.any()
    torch.testing.assert_close(gradient, tensor(case["expected"]["grad_logp"]), **TOLERANCE)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("gspo", "seq-mean-token-mean"), ("luspo", "seq-mean-token-sum"), ("dr", "dr"), ("token", "token-mean")],
)
def test_aggregations(ours: str, theirs: str) -> None:
    case = ORACLES["aggregation_length_bias"]
    result, gradient = evaluate(case["inputs"], aggregation=ours)
    expected = case["expected"][theirs]
    torch.testing.assert_close(result.loss.detach(), tensor(expected["loss"]), **TOLERANCE)
    torch.testing.assert_close(gradient[:, 0], tensor(expected["per_token_grad"]), **TOLERANCE)


def test_degenerate_rows_leave_the_count_and_stay_finite() -> None:
    case = ORACLES["degenerate_rows"]
    for name, keep in (("keep_zero_var", [True, True, True]), ("drop_zero_var", [True, True, False])):
        result, gradient = evaluate(case["inputs"], keep=keep)
        check(result, gradient, case["expected"][name])
        assert torch.isfinite(gradient).all()


def test_advantages_match_the_oracle() -> None:
    case = ORACLES["group_advantages"]
    for name, rewards in case["inputs"].items():
        expected = case["expected"][name]
        plain = group_advantages(rewards, len(rewards), normalise_std=False)
        scaled = group_advantages(rewards, len(rewards), normalise_std=True)
        torch.testing.assert_close(tensor(plain.values), tensor(expected["mean_only"]), **TOLERANCE)
        torch.testing.assert_close(tensor(scaled.values), tensor(expected["std_ddof1_eps1e6"]), **TOLERANCE)
        assert plain.constant_groups == int(expected["zero_variance"])
        assert all(plain.keep) is not expected["zero_variance"]


def test_unjudged_rewards_stay_out_of_the_mean() -> None:
    advantages = group_advantages([1.0, None, 0.0, float("nan")], 4, normalise_std=False)
    assert advantages.values == [0.5, 0.0, -0.5, 0.0]
    assert advantages.keep == [True, False, True, False]
    assert advantages.unjudged == 2


def test_a_group_with_one_judged_episode_is_constant_not_nan() -> None:
    advantages = group_advantages([1.0, None], 2, normalise_std=True)
    assert advantages.values == [0.0, 0.0]
    assert advantages.constant_groups == 1


def test_clip_bounds_follow_the_schedule() -> None:
    case = ORACLES["drc_epsilon_schedule"]
    for wins in (1, 2, 4, 6, 7):
        expected = case["expected"][f"binary_{wins}of8"]
        adv = group_advantages(expected["rewards"], 8, normalise_std=False)
        bounds = clip_bounds(tensor(adv.values), tensor(adv.rms), MODULATED)
        torch.testing.assert_close(bounds.high[0], tensor(expected["eps_high_success"]), **TOLERANCE)
        torch.testing.assert_close(bounds.low[-1], tensor(expected["eps_low_failure"]), **TOLERANCE)


def test_modulation_zero_is_plain_gspo_bit_for_bit() -> None:
    case = ORACLES["drc_rare_success_not_clipped"]
    plain, plain_gradient = evaluate(case["inputs"], PLAIN, rms=0.33071891388307384)
    check(plain, plain_gradient, case["expected"]["gspo"])
    wide, wide_gradient = evaluate(case["inputs"], MODULATED, rms=0.33071891388307384)
    check(wide, wide_gradient, case["expected"]["gspo_drc"])
    bounds = clip_bounds(tensor(case["inputs"]["advantage"]), tensor([0.33] * 8), PLAIN)
    assert set(bounds.low.tolist()) == {3e-4}
    assert set(bounds.high.tolist()) == {4e-4}


@pytest.mark.parametrize("aggregation", ["gspo", "dr", "luspo", "token"])
def test_any_split_into_micro_batches_gives_the_same_gradient(aggregation: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, length = 7, 9
    logprobs = (-torch.rand(rows, length, generator=generator, dtype=torch.float64)).requires_grad_()
    old = logprobs.detach() + 1e-3 * torch.randn(rows, length, generator=generator, dtype=torch.float64)
    mask = (torch.rand(rows, length, generator=generator) < 0.7).double()
    mask[3] = 0
    advantages = torch.randn(rows, generator=generator, dtype=torch.float64)
    normaliser = Normaliser(int((mask.sum(1) > 0).sum()), int(mask.sum()), length)

    def gradient(parts: list[list[int]]) -> torch.Tensor:
        total = torch.zeros(())
        for part in parts:
            weights = token_weights(mask[part], aggregation, normaliser)
            spread = advantages[part][:, None].expand(-1, length)
            terms = PolicyTerms(logprobs[part], old[part], mask[part], spread, weights)
            total = total + gspo(terms, clip_bounds(advantages[part], torch.ones(len(part)), MODULATED)).loss
        return torch.autograd.grad(total, logprobs)[0]

    whole = gradient([list(range(rows))])
    torch.testing.assert_close(gradient([[6, 0], [3], [1, 2, 5], [4]]), whole, **TOLERANCE)
    assert whole.abs().sum() > 0
