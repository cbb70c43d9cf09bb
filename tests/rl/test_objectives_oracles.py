"""Corrections, penalties, controllers and the other objectives against independent float64 oracles."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from infra.compute.attention.shared_prefix import SharedPrefixAttention, make_layout
from rl.advantages import group_advantages
from rl.objectives.aggregation import Normaliser, count, token_weights
from rl.objectives.clip import clip_bounds, dcpo_bounds, sigmoid_bounds
from rl.objectives.config import CorrectionConfig, EntropyConfig, LengthConfig
from rl.objectives.correction import (
    CorrectionMetrics,
    bypass_allowed,
    correct,
    off_policy_keep,
    rollout_ratio,
)
from rl.objectives.entropy import EntropyFloor, entropy_bonus, entropy_from_logits
from rl.objectives.grpo import cispo, gmpo, grpo, sapo, soft_gate
from rl.objectives.gspo import gspo
from rl.objectives.kl import kl_estimate, kl_loss, reward_penalty
from rl.objectives.length import (
    RepetitionStop,
    mask_truncated,
    repeated_ngrams,
    run_window,
    shaped_reward,
    soft_overlong_penalty,
)
from rl.objectives.process import min_form, mix, spread_steps, sum_form, trajectory_score
from rl.objectives.terms import ObjectiveResult, PolicyTerms
from tests.rl.objectives import MODULATED, ORACLES, close, random_batch, tensor


def case(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return ORACLES[name]["inputs"], ORACLES[name]["expected"]


def terms_of(inputs: dict[str, Any], advantage: float) -> tuple[PolicyTerms, torch.Tensor]:
    logprobs = tensor(inputs["logp"]).requires_grad_()
    mask = tensor(inputs["mask"])
    weights = token_weights(mask, "gspo", count(mask, 1))
    return PolicyTerms(logprobs, tensor(inputs["old_logp"]), mask, torch.full_like(mask, advantage), weights), logprobs


@pytest.mark.parametrize(("sign", "advantage"), [("A=+1", 1.0), ("A=-1", -1.0)])
def test_grpo_cispo_gmpo_and_gspo_on_the_same_input(sign: str, advantage: float) -> None:
    inputs, expected = case("grpo_cispo_gmpo_gspo_same_input")
    eps, wanted = inputs["eps"], expected[sign]
    terms, logprobs = terms_of(inputs, advantage)
    bounds = clip_bounds(tensor([advantage]), tensor([1.0]), MODULATED.model_copy(update={"low": eps, "high": eps}))
    results: dict[str, ObjectiveResult] = {
        "grpo": grpo(terms, eps, eps),
        "cispo": cispo(terms, eps, eps),
        "gmpo": gmpo(terms, inputs["gmpo_eps"]),
        "gspo_eps02": gspo(terms, bounds),
    }
    for name, result in results.items():
        close(result.loss, wanted[name]["loss"])
        close(torch.autograd.grad(result.loss, logprobs)[0], wanted[name]["grad"])
    close(results["grpo"].ratio, wanted["grpo"]["token_ratio"])
    assert results["grpo"].zeroed.tolist() == wanted["grpo"]["clip_active"]
    close(results["gmpo"].ratio, wanted["gmpo"]["seq_weight"])
    close(results["gspo_eps02"].ratio, wanted["gspo_eps02"]["seq_ratio"])


@pytest.mark.parametrize("name", ["gspo", "grpo", "capped", "gmpo", "sapo"])
def test_gradients_equal_finite_differences(name: str) -> None:
    """Those objectives whose value is the function that the gradient is of (constant advantage per sequence)."""
    batch = random_batch(3, 5, 6, 0.3)
    weights = token_weights(batch.mask, "gspo", count(batch.mask, 6))

    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        spread = batch.outcome[:, None].expand_as(batch.mask)
        terms = PolicyTerms(logprobs, batch.old, batch.mask, spread, weights)
        wide = MODULATED.model_copy(update={"low": 0.1, "high": 0.15})
        match name:
            case "gspo":
                return gspo(terms, clip_bounds(batch.outcome, batch.rms, wide)).loss
            case "grpo":
                return grpo(terms, 0.2, 0.28).loss
            case "capped":
                return grpo(terms, 0.1, 0.1, cap=1.2).loss
            case "gmpo":
                return gmpo(terms, 0.2).loss
            case _:
                return sapo(terms, 1.0, 1.05).loss

    assert torch.autograd.gradcheck(loss, batch.logprobs.clone().requires_grad_(), eps=1e-6, atol=3e-9, rtol=0)


def test_a_cap_bounds_the_loss_of_a_negative_advantage() -> None:
    mask = torch.ones(1, 1, dtype=torch.float64)
    logprobs = tensor([[math.log(8.0)]]).requires_grad_()
    terms = PolicyTerms(logprobs, tensor([[0.0]]), mask, -mask, mask)
    assert grpo(terms, 0.2, 0.28).loss.item() == pytest.approx(8.0)
    capped = grpo(terms, 0.2, 0.28, cap=4.0)
    assert capped.loss.item() == 4.0
    assert capped.zeroed.all()
    assert torch.autograd.grad(capped.loss, logprobs)[0].item() == 0.0


def test_soft_gate_and_its_slope() -> None:
    inputs, expected = case("sapo_gate")
    for tau, value, slope in (("tau_pos", "f_pos", "df_pos"), ("tau_neg", "f_neg", "df_neg")):
        ratio = tensor(inputs["ratio"]).requires_grad_()
        gate = soft_gate(ratio, tensor(inputs[tau]))
        close(gate, expected[value])
        close(torch.autograd.grad(gate.sum(), ratio)[0], expected[slope])


def test_published_dynamic_clips() -> None:
    inputs, expected = case("drc_related")
    bounds = dcpo_bounds(tensor(inputs["dcpo_old_prob"]).log(), *inputs["dcpo_eps"])
    close(1 - bounds.low, expected["dcpo_low"])
    close(1 + bounds.high, expected["dcpo_high"])
    shifted = sigmoid_bounds(
        tensor(inputs["advclip_adv"]),
        tensor(inputs["advclip_old_prob"]).log(),
        inputs["advclip_base_eps"],
        inputs["lambda_max"],
        inputs["gamma"],
    )
    close(shifted.low, expected["advclip_eps_low"])
    close(shifted.high, expected["advclip_eps_high"])


def test_kl_estimators_their_losses_and_gradients() -> None:
    inputs, expected = case("kl_estimators")
    mask, reference = tensor(inputs["mask"]), tensor(inputs["ref_logp"])
    weights = token_weights(mask, "gspo", count(mask, 1))
    for estimator in ("k1", "k2", "k3"):
        logprobs = tensor(inputs["logp"]).requires_grad_()
        estimate = kl_estimate(logprobs, reference, mask, estimator)
        close(estimate.values, expected[estimator])
        loss = inputs["beta"] * (weights * estimate.values).sum()
        close(loss, expected["loss"][estimator])
        close(torch.autograd.grad(loss, logprobs)[0], expected["grad"][estimator])
        assert estimate.clamped.item() == 0
    for kind in ("k2", "k3"):
        logprobs = tensor(inputs["logp"])
        close(inputs["beta"] * kl_loss(logprobs, reference, mask, weights, kind)[0], expected["loss"][kind])
    shaped = tensor(expected["in_reward"]["rewards"]) - reward_penalty(tensor(inputs["logp"]), reference, mask, 0.1)
    close(shaped, expected["in_reward"]["shaped"])


def test_unbiased_kl_keeps_its_ratio_live() -> None:
    inputs, expected = case("kl_estimators")
    mask, reference, old = tensor(inputs["mask"]), tensor(inputs["ref_logp"]), tensor(inputs["old_logp_for_unbiased"])
    weights = token_weights(mask, "gspo", count(mask, 1))
    logprobs = tensor(inputs["logp"]).requires_grad_()
    loss, estimate = kl_loss(logprobs, reference, mask, weights, "k3", old)
    close(estimate.values, expected["unbiased_k3"])
    close(inputs["beta"] * loss, expected["unbiased_loss"])
    close(torch.autograd.grad(inputs["beta"] * loss, logprobs)[0], expected["unbiased_grad"])


def test_penalty_in_the_reward_has_on_policy_the_gradient_of_k2_in_the_loss() -> None:
    """arXiv 2510.01555, in expectation: every token of a one-step softmax policy, weighted by its probability."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_()
    reference = torch.log_softmax(torch.randn(6, generator=generator, dtype=torch.float64), -1)[:, None]
    logprobs = torch.log_softmax(logits, -1)[:, None]
    mask = torch.ones(6, 1, dtype=torch.float64)
    chance = logprobs.detach().exp()
    in_loss, _ = kl_loss(logprobs, reference, mask, chance, "k2")
    in_reward = (chance * reward_penalty(logprobs, reference, mask, 1.0)[:, None] * logprobs).sum()
    close(
        torch.autograd.grad(in_loss, logits, retain_graph=True)[0], torch.autograd.grad(in_reward, logits)[0].tolist()
    )


def test_trainer_rollout_correction() -> None:
    inputs, expected = case("trainer_rollout_correction")
    old, rollout, mask = (tensor(inputs[name]) for name in ("old_logp", "rollout_logp", "mask"))
    ratio = rollout_ratio(old, rollout, mask)
    close(ratio.token, expected["token_ratio"])
    close(ratio.product, expected["seq_ratio_product"])
    close(ratio.geometric, expected["seq_ratio_geo"])
    close(ratio.k3, expected["seq_mean_k3"])
    base = CorrectionConfig(old_logprobs="recompute")

    def with_(**changes: Any) -> CorrectionConfig:
        return base.model_copy(update=changes)

    tis = correct(old, rollout, mask, with_(weights="token_tis", cap=inputs["C"]))
    close(tis.weights, expected["tis_token_C2"])
    assert tis.metrics.capped == 2
    close(tis.metrics.figures()["rl.logprob_drift"], expected["abs_logprob_diff_mean"])
    assert tis.metrics.k3_mean == pytest.approx((4 * ratio.k3[0].item() + 3 * ratio.k3[1].item()) / 7, abs=1e-12)
    low, high = inputs["icepop"]
    ice = correct(old, rollout, mask, with_(weights="icepop", icepop_low=low, icepop_high=high))
    close(ice.weights, expected["icepop_weight"])
    assert (ice.weights > 0).tolist() == expected["mask_token_icepop_05_5"]
    assert ice.metrics.dropped_tokens == 2
    sequence = correct(old, rollout, mask, with_(weights="sequence_tis", cap=inputs["C"]))
    close(sequence.weights, (tensor(expected["seq_tis_C2"])[:, None] * mask).tolist())
    geometric = correct(old, rollout, mask, with_(mask="geometric"))
    assert geometric.keep.tolist() == expected["geo_rs_keep_0999_1001"]
    k3 = correct(old, rollout, mask, with_(mask="k3", k3_limit=inputs["k3_threshold"]))
    assert k3.keep.tolist() == expected["k3_rs_keep_001"]
    assert not k3.weights.any()
    assert k3.metrics.dropped_sequences == 2
    kept = correct(old, rollout, mask, with_(mask="k3", k3_limit=1.0))
    assert kept.keep.tolist() == [True, False]
    assert kept.weights.tolist() == [[1.0] * 4, [0.0] * 4]


def test_correction_metrics_of_parts_add_up() -> None:
    batch = random_batch(1, 6, 5)
    config = CorrectionConfig(old_logprobs="recompute", weights="icepop", icepop_low=0.8, icepop_high=1.5, mask="k3")
    whole = correct(batch.old, batch.rollout, batch.mask, config)
    parts = [correct(batch.old[p], batch.rollout[p], batch.mask[p], config) for p in ([0, 4], [1, 2, 3], [5])]
    total: CorrectionMetrics = parts[0].metrics + parts[1].metrics + parts[2].metrics
    assert total.figures() == pytest.approx(whole.metrics.figures(), abs=1e-12)
    assert whole.metrics.dropped_sequences > 0
    torch.testing.assert_close(torch.cat([p.weights for p in parts]), whole.weights[[0, 4, 1, 2, 3, 5]])


def test_bypass_needs_a_mismatch_of_at_most_a_third_of_the_clip_bound() -> None:
    def measured(noise: float) -> CorrectionMetrics:
        old = torch.zeros(4, 1000, dtype=torch.float64)
        jitter = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return correct(old, old + noise * jitter, torch.ones_like(old), CorrectionConfig()).metrics

    assert measured(0.01).k3_mean == pytest.approx(0.5e-4, rel=0.1)
    assert bypass_allowed(measured(0.01), 3e-4)
    assert not bypass_allowed(measured(0.02), 3e-4)
    assert bypass_allowed(measured(0.02), 6e-4 + 1e-4)
    nothing = correct(*(torch.zeros(2, 3),) * 3, CorrectionConfig())
    assert math.isnan(nothing.metrics.k3_mean)
    assert not bypass_allowed(nothing.metrics, 3e-4), "nothing measured is not a permission"
    assert nothing.metrics.figures() == {}


def test_off_policy_sequences_with_a_negative_advantage_are_dropped() -> None:
    inputs, expected = case("off_policy_sequence_mask")
    logprobs, old, mask, advantages = (tensor(inputs[n]) for n in ("logp", "old_logp", "mask", "advantage"))
    assert off_policy_keep(logprobs, old, mask, advantages, inputs["delta"]).tolist() == expected["keep"]
    left = tensor(expected["mean_log_old_minus_new"])
    for limit in (left[0].item() + 1e-12, left[0].item() - 1e-12):
        assert off_policy_keep(logprobs, old, mask, advantages, limit)[0].item() == (limit > left[0].item())


def test_everything_at_once() -> None:
    inputs, expected = case("full_objective_end_to_end")
    logprobs = tensor(inputs["logp"]).requires_grad_()
    old, rollout, reference, mask = (tensor(inputs[n]) for n in ("old_logp", "rollout_logp", "ref_logp", "mask"))
    group = group_advantages(inputs["rewards"], 4, normalise_std=False)
    close(tensor(group.values), inputs["advantage"])
    kept = mask_truncated(group, inputs["truncated"])
    assert kept.keep == [True, True, True, False]
    trained = mask * tensor(kept.keep)[:, None]
    normaliser = count(trained, 5)
    assert normaliser == Normaliser(expected["N_effective"], 9, 5)
    weights = token_weights(trained, "gspo", normaliser)
    outcome = tensor(group.values)
    advantages = mix(outcome, tensor(inputs["process_advantage"]), tensor(inputs["think_mask"]), inputs["alpha"])
    close(advantages * mask, expected["token_advantage"])
    bounds = clip_bounds(outcome, tensor(group.rms), MODULATED)
    close(bounds.low, expected["eps_low"])
    close(bounds.high, expected["eps_high"])
    config = CorrectionConfig(old_logprobs="recompute", weights="token_tis", cap=inputs["tis_C"])
    correction = correct(old, rollout, mask, config)
    close(correction.weights, expected["is_weight"])
    terms = PolicyTerms(logprobs, old, trained, advantages, weights, correction.weights)
    result = gspo(terms, bounds)
    close(result.ratio[:3], expected["seq_ratio"][:3])
    assert result.zeroed.tolist() == expected["token_clip_active"]
    loss = result.loss + inputs["beta"] * kl_loss(logprobs, reference, trained, weights, "k2")[0]
    close(loss, expected["loss"])
    close(torch.autograd.grad(loss, logprobs)[0], expected["grad_logp"])


def test_soft_overlong_penalty_has_a_floor() -> None:
    inputs, expected = case("soft_overlong_penalty")
    ours = [soft_overlong_penalty(length, inputs["L_max"], inputs["L_cache"]) for length in inputs["lengths"]]
    assert ours == pytest.approx(expected["dapo"], abs=1e-12)
    within = [length <= inputs["L_max"] for length in inputs["lengths"]]
    assert [o for o, w in zip(ours, within, strict=True) if w] == [
        v for v, w in zip(expected["verl_min_formula"], within, strict=True) if w
    ]
    assert expected["verl_min_formula"][-1] < -3, "without a floor a runaway answer dominates its group"
    with pytest.raises(ValueError, match="cache"):
        soft_overlong_penalty(5, 10, 0)


def test_repetition() -> None:
    inputs, expected = case("repetition_detection")
    for size in inputs["ngram"]:
        ours = [inputs["max_penalty"] * repeated_ngrams(ids, size) for ids in inputs["sequences"]]
        assert ours == pytest.approx(expected[f"n{size}"], abs=1e-12)

    def feed(window: int) -> tuple[bool, int]:
        stop = RepetitionStop(window, inputs["threshold"])
        stopped = [stop.feed(math.log(p)) for p in inputs["probs"]]
        return True in stopped, stop.longest

    assert feed(3) == (expected["triggers_at_W3"], expected["longest_run"])
    assert feed(4) == (expected["triggers_at_W4"], expected["longest_run"])
    assert (run_window(96), run_window(8192), run_window(100_000), run_window(4)) == (12, 1024, 3000, 1)


def test_shaped_rewards() -> None:
    loop = [5, 5, 5, 5, 5, 5, 5, 5]
    plain = LengthConfig()
    assert shaped_reward(0.7, loop, 8, plain) == 0.7
    assert shaped_reward(None, loop, 8, LengthConfig(ngram_penalty=1.0)) is None, "not judged is not zero"
    assert shaped_reward(1.0, loop, 8, LengthConfig(overlong_cache=4, overlong_penalty=0.5)) == 0.5
    assert shaped_reward(1.0, list(range(6)), 8, LengthConfig(overlong_cache=4)) == 0.5
    assert shaped_reward(1.0, loop, 8, LengthConfig(ngram_penalty=0.6)) == pytest.approx(1 - 0.6 * 5 / 6)
    assert shaped_reward(1.0, loop, 8, LengthConfig(ngram_limit=0.5)) == 0.0
    assert shaped_reward(1.0, list(range(8)), 8, LengthConfig(ngram_limit=0.5, ngram_penalty=1.0)) == 1.0


def test_entropy_floor_controller_and_its_state() -> None:
    inputs, expected = case("entropy_floor_controller")
    config = EntropyConfig(target=inputs["target"], step=inputs["delta"], largest=inputs["alpha_max"])
    floor = EntropyFloor(config)
    for wanted in expected["trace"]:
        resumed = EntropyFloor(config)
        resumed.load_state_dict(floor.state_dict())
        assert floor.update(wanted["H"]) == pytest.approx(wanted["applied"], abs=1e-12)
        assert floor.coefficient == pytest.approx(wanted["coef_after_update"], abs=1e-12)
        resumed.update(wanted["H"])
        assert resumed.state_dict() == floor.state_dict()
    before = floor.state_dict()
    floor.update(math.nan)
    assert floor.state_dict() == before, "what was not measured moves nothing"
    relative = EntropyFloor(EntropyConfig(largest=0.01))
    assert [relative.update(h) for h in (2.0, 0.61, 0.6, 0.1, 0.1)] == [0.0, 0.0, 0.005, 0.01, 0.01]
    assert EntropyFloor(EntropyConfig(target=1.0)).update(0.0) == 0.0, "off by default"


def test_entropy_and_its_gradient() -> None:
    inputs, expected = case("entropy_floor_controller")
    logits = tensor(inputs["probs"]).log().requires_grad_()
    entropy = entropy_from_logits(logits)
    close(entropy, expected["entropy"])
    close(torch.autograd.grad(entropy, logits)[0], expected["entropy_grad_logits"])
    masked = tensor([1.0, 0.5, float("-inf")]).requires_grad_()
    both = entropy_from_logits(masked, temperature=0.7)
    close(both, entropy_from_logits(masked[:2], temperature=0.7).item())
    assert torch.isfinite(torch.autograd.grad(both, masked)[0]).all()
    assert entropy_from_logits(torch.zeros(2, 4, dtype=torch.bfloat16)).dtype == torch.float32
    mask = tensor([[1.0, 0.0]])
    bonus = entropy_bonus(tensor([[0.5, float("nan")]]), mask, mask, 0.02)
    assert bonus.item() == -0.01


def test_process_advantages() -> None:
    inputs, expected = case("prm_step_advantages")
    group = inputs["step_scores"]
    for ours, theirs in zip(sum_form(group), expected["sum_form"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-12)
    for ours, theirs in zip(min_form(group), expected["min_form_advantage"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-12)
    assert [v + expected["min_form_baseline"] for v in min_form(group)[1] or []] == pytest.approx(
        expected["min_form_value"][1], abs=1e-12
    )
    for how, wanted in expected["aggregate"].items():
        assert [trajectory_score(p, how) for p in group] == pytest.approx(wanted, abs=1e-12)
    assert trajectory_score([], "min") is None


def test_padding_with_good_steps_pays_in_the_sum_form_only() -> None:
    """The oracle keeps the statistics of the group; so does a padded trajectory in a large one."""
    inputs, expected = case("prm_step_advantages")
    attack = expected["padding_attack"]
    scores = [p for steps in inputs["step_scores"] for p in steps]
    mean, std = np.mean(scores), np.std(scores) + inputs["delta"]
    gain = attack["after"]["sum_rtg0"] - attack["before"]["sum_rtg0"]
    assert gain == pytest.approx((0.95 - mean) / std, abs=1e-12)
    crowd = inputs["step_scores"] * 200
    padded = [[*crowd[0], 0.95], *crowd[1:]]
    honest, cheating = (form[0] for form in (sum_form(crowd), sum_form(padded)))
    assert honest is not None
    assert cheating is not None
    assert cheating[0] - honest[0] == pytest.approx(gain, rel=0.01)
    for plain, more in zip(min_form(crowd)[0] or [], min_form(padded)[0] or [], strict=False):
        assert plain - 1e-3 < more <= plain, "the value stays, and the baseline rises a little"


def test_a_step_that_could_not_be_judged_leaves_its_trajectory_without_process_advantages() -> None:
    for form in (min_form, sum_form):
        whole, broken, nan, missing = form([[0.2, 0.9], [0.1, None], [0.3, math.nan], None])
        assert whole == form([[0.2, 0.9]])[0]
        assert broken is nan is missing is None
        assert form([None]) == [None]
        assert form([[]]) == [[]]
    assert spread_steps(None, [(0, 2)], 3) == ([0.0] * 3, [0] * 3)


def test_steps_are_spread_over_their_tokens() -> None:
    assert spread_steps([0.5, -1.0], [(0, 2), (3, 4)], 6) == ([0.5, 0.5, 0, -1.0, 0, 0], [1, 1, 0, 1, 0, 0])
    with pytest.raises(ValueError, match="outside"):
        spread_steps([0.5], [(4, 7)], 6)
    with pytest.raises(ValueError, match="shorter"):
        spread_steps([0.5], [], 6)


def test_failed_outcomes_get_no_positive_process_advantage() -> None:
    outcome = tensor([-0.5, 0.5])
    process, think = tensor([[0.8, -0.4, 0.8]] * 2), tensor([[1.0, 1.0, 0.0]] * 2)
    mixed = mix(outcome, process, think, 0.2, torch.tensor([True, False]))
    close(mixed, [[-0.4, -0.48, -0.5], [0.56, 0.32, 0.5]])
    close(mix(outcome, process, think, 0.2), [[-0.24, -0.48, -0.5], [0.56, 0.32, 0.5]])
    assert torch.equal(mix(outcome, process * math.nan, think, 0.0), outcome[:, None].expand(2, 3))


def test_variance_of_the_sequence_ratio_shrinks_with_length_where_the_product_explodes() -> None:
    inputs, expected = case("variance_vs_length")
    generator = np.random.default_rng(inputs["seed"])
    for length in inputs["T"]:
        noise = torch.from_numpy(generator.normal(0, inputs["sigma"], size=(inputs["samples"], length)))
        logs, products = [], []
        for part in noise.split(500):
            mask = torch.ones_like(part)
            terms = PolicyTerms(part, torch.zeros_like(part), mask, mask, mask)
            one = torch.ones(len(part), dtype=torch.float64)
            logs.append(gspo(terms, clip_bounds(one, one, MODULATED)).ratio.log())
            products.append(rollout_ratio(part, torch.zeros_like(part), mask).product.log())
        wanted = expected[str(length)]
        close(torch.cat(logs).var(correction=0), wanted["mc_var_log_geo"])
        close(torch.cat(products).var(correction=0), wanted["mc_var_log_product"])
        assert torch.cat(logs).var().item() == pytest.approx(wanted["analytic_var_log_geo"], rel=0.1)


def test_attention_sink_forward_and_backward() -> None:
    """The oracle's queries as completions of one token: they see the prompt's three keys, and their own not at all."""
    inputs, expected = case("attention_sink_fwd_bwd")
    q, k, v, grad = (tensor(inputs[name]) for name in ("Q", "K", "V", "dO"))
    hidden = -1e4 * q  # a key that its query gives no weight
    queries = torch.cat([torch.zeros(3, 2, dtype=torch.float64), q])[None, None].requires_grad_()
    keys = torch.cat([k, hidden])[None, None].requires_grad_()
    values = torch.cat([v, torch.zeros_like(q)])[None, None].requires_grad_()
    sink = tensor([inputs["sink"]]).requires_grad_()
    out = SharedPrefixAttention.apply(queries, keys, values, sink, 2**-0.5, make_layout([(3, [1, 1])]), None)
    close(out[0, 0, 3:], expected["O"])
    dq, dk, dv, dsink = torch.autograd.grad((out[0, 0, 3:] * grad).sum(), [queries, keys, values, sink])
    close(dq[0, 0, 3:], expected["dQ"])
    close(dk[0, 0, :3], expected["dK"])
    close(dv[0, 0, :3], expected["dV"])
    close(dsink, [expected["dsink"]])
    assert abs(dsink.item() - expected["literal_blog_reading_wrong"]) > 0.02


def test_leave_one_out_is_the_mean_form_times_g_over_g_minus_one() -> None:
    inputs, expected = case("group_advantages")
    for name, rewards in inputs.items():
        wanted = expected[name]
        size = len(rewards)
        alone = group_advantages(rewards, size, False, baseline="leave_one_out")
        close(tensor(alone.values), wanted["leave_one_out"])
        close(tensor(alone.values), [size / (size - 1) * a for a in wanted["mean_only"]])
        close(tensor(group_advantages(rewards, size, True, ddof=0).values), wanted["std_ddof0_eps1e6"])
        mean = group_advantages(rewards, size, False)
        close(tensor(mean.rms), [wanted["group_rms_mean_only"]] * size)


def test_truncated_episodes_leave_the_loss_but_stay_in_the_baseline() -> None:
    group = group_advantages([1.0, 0.0, 0.0, 0.0], 4, normalise_std=False)
    kept = mask_truncated(group, [False, False, False, True])
    assert kept == replace(group, values=[0.75, -0.25, -0.25, 0.0], keep=[True, True, True, False])


def test_no_oracle_is_left_out() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_objectives*.py"))
    assert len(ORACLES) == 23
    assert [name for name in ORACLES if f'"{name}"' not in tests] == []
