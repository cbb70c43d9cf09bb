"""What a step does with each setting; that settings which are off do nothing; that what is on shows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from domain_rewards.episode import Episode
from domain_rewards.verifiers.base import verifier
from infra.compute.policy import load_policy
from infra.errors import CheckFailed, UsageError
from rl.config import RLConfig
from rl.learner import without_dropout
from rl.stage import run_rl
from rl.trainer import Trainer
from tests import toy
from tests.rl.cold import CONFIG, cold_policy

OBJECTIVES = ["gspo", "grpo", "cispo", "gmpo", "sapo", "dcpo", "ppo"]
LORA = {"rank": 4, "alpha": 8}


def settings(**changes: Any) -> RLConfig:
    return RLConfig.model_validate(CONFIG.model_dump(mode="json") | changes)


def trainer(*verifiers: Any, **changes: Any) -> Trainer:
    return Trainer(load_policy(cold_policy()), settings(**changes), toy.tasks()[:30], toy.runtime(*verifiers), 0)


def weights(of: Trainer) -> dict[str, torch.Tensor]:
    return of.learner.served_state()


def moved(of: Trainer) -> float:
    """Largest change of a served weight against the cold policy."""
    before = load_policy(cold_policy()).model.state_dict()
    return max(float((tensor - before[name]).abs().max()) for name, tensor in weights(of).items())


@verifier("noisy")
def noisy(episode: Episode) -> float:
    """Depends on the whole episode: variance in every group."""
    text = "".join((m.thinking or "") + (m.content or "") for m in episode.messages)
    return 0.5 * float(episode.answer == episode.task.reference["answer"]) + 0.5 * (len(text) % 5) / 4


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_trains(name: str) -> None:
    mine = trainer(noisy, objective={"name": name})
    figures = mine.train_step()
    assert figures["rl.updates"] >= 2
    assert figures["rl.on_policy_ratio_error"] < 1e-5
    assert figures["rl.logprob_drift"] < 1e-5
    assert all(math.isfinite(value) for value in figures.values())
    assert moved(mine) > 1e-5
    assert ("rl.value_loss" in figures) == (name == "ppo")


def test_ppo_trains_its_critic_towards_the_returns() -> None:
    mine = trainer(objective={"name": "ppo", "value_coefficient": 1.0}, learning_rate=3e-3, warmup_steps=0, epochs=4)
    losses = [mine.train_step()["rl.value_loss"] for _ in range(5)]
    assert losses[-1] < 0.7 * losses[0]


def test_one_update_per_rollout_needs_no_recomputation_and_has_the_ratio_one() -> None:
    mine = trainer(noisy, epochs=1, minibatch=16, clip={"low": 1e-9, "high": 1e-9})
    calls = []
    frozen = mine.learner.frozen_scores
    mine.learner.frozen_scores = lambda *a, **k: (calls.append(1), frozen(*a, **k))[1]  # type: ignore[method-assign]
    figures = mine.train_step()
    assert calls == []
    assert (figures["rl.updates"], figures["rl.clip_fraction"], figures["rl.ratio_outside"]) == (1.0, 0.0, 0.0)
    assert 0 < figures["rl.logprob_drift"] < 1e-5, "the mismatch is measured all the same"


def test_micro_batches_change_nothing() -> None:
    """Any split of a minibatch gives the same update, but for rounding."""
    split, whole = trainer(noisy, microbatch=2), trainer(noisy, microbatch=8)
    one, two = split.train_step(), whole.train_step()
    assert one["rl.grad_norm"] == pytest.approx(two["rl.grad_norm"], rel=1e-3)
    other = weights(whole)
    for name, tensor in weights(split).items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=5e-5)


class TestCorrection:
    def test_bypass_takes_the_engines_logprobs_where_the_mismatch_allows_it(self) -> None:
        figures = trainer(noisy, correction={"old_logprobs": "bypass"}).train_step()
        assert figures["rl.bypassed"] == 1.0
        assert "rl.on_policy_ratio_error" not in figures

    def test_bypass_is_refused_above_a_third_of_the_clip_bound(self) -> None:
        mine = trainer(noisy, correction={"old_logprobs": "bypass"}, guards={"drift": {"stop": None}})
        with torch.no_grad():  # the engine decodes with other weights than the trainer's
            mine.learner.model.lm_head.weight.mul_(1.5)
            mine.learner.model.model.layers[0].self_attn.q_proj.weight.mul_(1.5)
        with pytest.raises(CheckFailed, match="guard drift_k3 stopped"):
            mine.train_step()
        mine = trainer(
            noisy,
            correction={"old_logprobs": "bypass"},
            clip={"low": 1e-15, "high": 1e-15},
        )
        figures = mine.train_step()
        assert figures["rl.bypassed"] == 0.0
        assert figures["rl.on_policy_ratio_error"] < 1e-5, "so pi_old was recomputed"

    @pytest.mark.parametrize(
        "correction",
        [
            {"weights": "token_tis"},
            {"weights": "icepop"},
            {"weights": "sequence_tis"},
            {"mask": "geometric"},
            {"mask": "k3"},
            {"off_policy_limit": 0.5},
        ],
        ids=str,
    )
    def test_without_a_mismatch_a_correction_changes_nothing_to_speak_of(self, correction: dict[str, Any]) -> None:
        plain, corrected = trainer(noisy), trainer(noisy, correction=correction)
        expected, figures = plain.train_step(), corrected.train_step()
        assert figures["rl.grad_norm"] == pytest.approx(expected["rl.grad_norm"], rel=1e-2)
        assert figures["rl.correction_dropped_tokens"] == 0

    def test_a_mask_that_drops_everything_leaves_a_loss_of_zero(self) -> None:
        mine = trainer(
            noisy, correction={"mask": "geometric", "geometric_low": 1.0, "geometric_high": 1.0}, weight_decay=0
        )
        with torch.no_grad():
            mine.learner.model.model.layers[0].self_attn.q_proj.weight.mul_(1.01)
        figures = mine.train_step()
        assert figures["rl.correction_dropped_sequences"] > 0.9
        assert abs(figures["rl.loss"]) < 0.1
        assert math.isfinite(figures["rl.grad_norm"])


class TestReference:
    def test_rl_15_dropout_is_off_and_the_reference_is_frozen(self) -> None:
        """RL-15: the KL of step 0 is 0; the reference stays in eval mode whatever the policy does."""
        policy = load_policy(cold_policy())
        for layer in policy.model.model.layers:
            layer.self_attn.attention_dropout = 0.1
            layer.mlp.add_module("drop", torch.nn.Dropout(0.1))
        mine = Trainer(policy, settings(), toy.tasks()[:30], toy.runtime(noisy), 0)
        reference = mine.learner._reference
        assert not any(parameter.requires_grad for parameter in reference.parameters())
        policy.model.train()
        assert not any(module.training for module in reference.modules())
        assert mine.train_step()["rl.kl_to_reference"] <= 1e-7
        assert mine.train_step()["rl.kl_to_reference"] > 1e-7
        without_dropout(policy.model)
        assert policy.model.model.layers[0].mlp.drop.p == 0
        assert policy.model.model.layers[0].self_attn.attention_dropout == 0

    def test_kl_in_the_loss_holds_the_policy_back(self) -> None:
        free = [trainer(noisy, warmup_steps=0), {}]
        held = [trainer(noisy, warmup_steps=0, kl={"coefficient": 5.0}), {}]
        for side in (free, held):
            for _ in range(3):
                side[1] = side[0].train_step()
        assert held[1]["rl.kl_to_reference"] < 0.5 * free[1]["rl.kl_to_reference"]

    def test_kl_in_the_reward_is_taken_off_before_the_advantages(self) -> None:
        mine = trainer(toy.zero, warmup_steps=0, kl={"coefficient": 1.0, "place": "reward"})
        with torch.no_grad():  # away from the reference, so that sampled sequences differ in their KL
            mine.learner.model.lm_head.weight.mul_(1.2)
            mine.learner.model.model.layers[0].self_attn.q_proj.weight.mul_(1.01)
        mine.learner.updates += 1
        mine.learner.sync()
        figures = mine.train_step()
        assert figures["rl.reward"] == 0.0
        assert figures["rl.constant_groups"] < 1.0
        assert figures["rl.updates"] > 0

    def test_nothing_is_measured_when_nobody_wants_it(self) -> None:
        mine = trainer(noisy, kl={"measure": False})
        assert mine.learner._reference is None
        assert "rl.kl_to_reference" not in mine.train_step()


class TestEntropyFloor:
    def test_below_the_target_the_bonus_raises_entropy(self) -> None:
        def after(largest: float) -> float:
            floor = {"largest": largest, "step": 1.0, "target": 50.0}
            mine = trainer(noisy, entropy=floor, warmup_steps=0, learning_rate=2e-3)
            return [mine.train_step() for _ in range(5)][-1]["rl.entropy"]

        assert after(1.0) > 1.5 * after(0.0)

    def test_the_coefficient_is_reported_and_starts_after_the_first_measurement(self) -> None:
        mine = trainer(noisy, entropy={"largest": 0.05, "step": 0.005, "share": 0.99})
        first = mine.train_step()
        assert mine.floor is not None
        assert mine.floor.target == pytest.approx(0.99 * first["rl.entropy"])
        assert first["rl.entropy_coefficient"] == 0.0


class TestLengthAndRepetition:
    def test_the_overlong_penalty_makes_signal_of_lengths_alone(self) -> None:
        assert trainer(toy.zero).train_step()["rl.constant_groups"] == 1.0
        figures = trainer(toy.zero, length={"overlong_cache": 24}).train_step()
        assert figures["rl.constant_groups"] < 1.0
        assert figures["rl.reward"] == 0.0, "the reward that is reported has no penalty in it"

    def test_truncated_episodes_leave_the_loss_if_asked(self) -> None:
        kept = trainer(noisy, max_tokens=8)
        masked = trainer(noisy, max_tokens=8, length={"truncated": "mask"})
        assert 0 < kept.train_step()["rl.truncated"] < 1
        cut = [r.trajectory.end.value == "length" for r in masked._collect().rollouts]
        masked = trainer(noisy, max_tokens=8, length={"truncated": "mask"})
        keep = masked._collect().advantages.keep
        assert any(keep)
        assert not any(k and c for k, c in zip(keep, cut, strict=True))

    def test_a_run_of_certainty_ends_an_episode(self) -> None:
        mine = trainer(noisy, length={"run_window": 2, "run_threshold": 1e-6})
        ends = {r.trajectory.end.value for r in mine._collect().rollouts}
        assert ends == {"repetition"}
        assert all(r.trajectory.sampled_tokens == 2 for r in mine._collect().rollouts)


class TestDynamicSampling:
    def test_ro_06_all_solved_data_ends_after_the_rounds(self) -> None:
        """RO-06: a reward that is always 1 is asked for three batches and no more."""
        mine = trainer(toy.constant, sampling_rounds=3)
        figures = mine.train_step()
        assert figures["rl.episodes"] == 3 * 4 * 4
        assert mine.sampler.position == 3 * 4
        assert "rl.updates" not in figures

    def test_ro_06_useful_groups_fill_the_batch_and_none_is_trained_twice(self) -> None:
        """RO-06: one group of two has signal; two rounds fill a batch of four."""

        @verifier("even")
        def even(episode: Episode) -> float:
            return float(next(count) % 2) if int(episode.task.task_id[1:]) % 2 else 0.0

        import itertools

        count = itertools.count()
        mine = trainer(even, sampling_rounds=4)
        collected = mine._collect()
        useful = collected.advantages.groups - collected.advantages.constant_groups
        tasks = [r.trajectory.task_id for r in collected.rollouts][::4]
        assert useful >= 4
        assert len(tasks) == len(set(tasks)) < 16
        assert mine.sampler.position == len(tasks)


class TestAdapters:
    def test_only_adapters_are_trained_and_the_engine_follows(self) -> None:
        mine = trainer(noisy, lora=LORA, warmup_steps=0, learning_rate=5e-3)
        names = [name for name, _ in mine.learner.named_parameters()]
        assert names
        assert all("lora_" in name for name in names)
        first, second = mine.train_step(), mine.train_step()
        assert first["rl.kl_to_reference"] <= 1e-7
        assert second["rl.kl_to_reference"] > 1e-6, "the base without adapters is the reference"
        assert second["rl.logprob_drift"] < 1e-5, "the engine has the merged weights"
        assert moved(mine) > 1e-4

    def test_ro_07_a_sync_that_does_not_arrive_is_an_error(self) -> None:
        """RO-07: updates were made, and the engine computes with what it had."""
        mine = trainer(noisy, lora=LORA, warmup_steps=0)
        mine.learner.served.load_state_dict = lambda state: None
        with pytest.raises(CheckFailed, match="the engine still has the old ones"):
            mine.train_step()

    def test_the_saved_policy_is_a_plain_model(self, tmp_path: Path) -> None:
        config = settings(steps=2, lora=LORA, learning_rate=5e-3, warmup_steps=0, keep="last")
        out = run_rl(
            cold_policy(), config, toy.tasks()[:30], toy.tasks()[30:], toy.runtime(noisy), tmp_path, 0, toy.ignore
        )
        saved, before = load_policy(out.policy).model.state_dict(), load_policy(cold_policy()).model.state_dict()
        assert saved.keys() == before.keys()
        assert any(not torch.equal(saved[name], before[name]) for name in saved)
        assert torch.equal(saved["lm_head.weight"], before["lm_head.weight"]), "not a target"


class TestAverage:
    def test_the_average_is_what_is_evaluated_and_saved(self, tmp_path: Path) -> None:
        config = settings(steps=3, average=0.999999, warmup_steps=0, keep="last", eval_every=0)
        out = run_rl(
            cold_policy(), config, toy.tasks()[:30], toy.tasks()[30:], toy.runtime(noisy), tmp_path, 0, toy.ignore
        )
        saved, before = load_policy(out.policy).model.state_dict(), load_policy(cold_policy()).model.state_dict()
        assert all(torch.allclose(saved[name], before[name], atol=1e-6) for name in saved)

    def test_training_goes_on_with_the_live_weights(self) -> None:
        plain, averaged = trainer(noisy), trainer(noisy, average=0.5)
        for each in (plain, averaged):
            each.train_step()
            with each.learner.averaged():
                inside = weights(each)
            each.train_step()
        live = weights(averaged)
        assert all(torch.equal(tensor, live[name]) for name, tensor in weights(plain).items())
        assert any(not torch.equal(tensor, live[name]) for name, tensor in inside.items())


def test_rl_06_a_verifier_that_says_nan_drops_the_episode_and_is_counted() -> None:
    """RL-06: the episode is unjudged, its neighbours are not, and the counter names the verifier."""
    import itertools

    asked = itertools.count()

    @verifier("sometimes_nan")
    def sometimes_nan(episode: Episode) -> float:
        return math.nan if next(asked) == 1 else 0.5

    mine = trainer(noisy, sometimes_nan)
    figures = mine.train_step()
    assert figures["rl.unjudged.sometimes_nan"] == 1.0
    assert figures["rl.unjudged"] == 1 / 16
    assert all(math.isfinite(value) for value in figures.values())
    assert moved(mine) > 0


def test_rl_14_the_first_ratio_is_one_whatever_the_batch() -> None:
    """RL-14: old log-probs in one layout, new ones in others; no clipping, no KL before the first update."""
    mine = trainer(noisy, epochs=1, microbatch=1)
    collected = mine._collect()
    kept = [i for i, keep in enumerate(collected.advantages.keep) if keep]
    experience, figures = mine._prepare(collected, kept)
    assert experience.old_logprobs is not None
    with torch.no_grad():
        batched = mine.learner.score(experience).logprobs
    error = ((batched - experience.old_logprobs) * experience.batch.mask).exp().sub(1).abs().max()
    assert 0 < float(error) <= 1e-5
    assert figures["rl.kl_to_reference"] <= 1e-6


def test_rl_25_a_back_end_without_sinks_is_refused_at_the_start() -> None:
    """RL-25: nothing trains on an attention that drops the model's sinks."""
    policy = load_policy(cold_policy())
    policy.model.config._attn_implementation = "sdpa"
    with pytest.raises(UsageError, match="'sdpa' ignores the model's attention sinks"):
        Trainer(policy, settings(), toy.tasks()[:30], toy.runtime(), 0)


def test_alarms_are_counted_and_a_skipped_update_is_not_made() -> None:
    mine = trainer(noisy, guards={"gradient": {"floor": 0.0, "spike": 1.0001, "least": 2}, "max_skips": 99})
    steps = [mine.train_step() for _ in range(5)]
    assert mine.alarms == sum(figures["rl.alarms"] for figures in steps) > 0
    planned = sum(figures["rl.episodes"] for figures in steps) / 16 * 4
    assert sum(figures["rl.updates"] for figures in steps) < planned


def test_lower_lr_lowers_it_for_the_rest_of_the_run() -> None:
    mine = trainer(noisy, guards={"kl": {"warn": None, "lower_lr": -1.0, "stop": None, "patience": 1}}, warmup_steps=0)
    rates = [mine.train_step()["rl.learning_rate"] for _ in range(3)]
    assert rates[1] < 0.6 * rates[0]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"length": {"overlong_cache": 99}}, "overlong_cache"),
        ({"objective": {"name": "ppo"}, "sampling_rounds": 2}, "sampling_rounds"),
        ({"lora": {"rank": 4, "dropout": 0.1}}, "lora.dropout must be 0"),
        ({"objective": {"name": "reinforce"}}, "objective"),
        ({"group_size": 1}, "group_size"),
        ({"kl": {"place": "reward", "estimator": "k3"}}, "always k1"),
        ({"average": 1.0}, "average"),
        ({"minibatch": 2}, "exceeds minibatch"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        settings(**changes)


@pytest.mark.parametrize("frozen", [False, True])
def test_frozen_routers_stay_and_all_else_moves(frozen: bool) -> None:
    mine = trainer(noisy, freeze_router=frozen)
    mine.train_step()
    before = load_policy(cold_policy()).model.state_dict()
    same = {name for name, tensor in weights(mine).items() if torch.equal(tensor, before[name])}
    routers = {name for name in before if ".router." in name}
    assert routers
    assert same == (routers if frozen else set())
