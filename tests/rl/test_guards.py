"""Each guard trips where it should, acts as configured, and does not repeat itself."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from infra.errors import CheckFailed
from rl.config import RLConfig
from rl.guards import Alarm, GuardConfig, GuardPanel, raise_on_stop
from rl.guards.alarm import sparkline
from rl.objectives.clip import ClipBounds
from rl.objectives.config import LengthConfig
from rl.objectives.gspo import PolicyTerms, gspo
from rl.stage import run_rl
from sft.config import SFTConfig
from sft.stage import run_sft
from tests import toy

HEALTHY: dict[str, float] = {
    "rl.reward": 0.5,
    "rl.entropy": 0.3,
    "rl.tokens": 40.0,
    "rl.thinking_token_ratio": 0.3,
    "rl.constant_groups": 0.4,
    "rl.solved_groups": 0.2,
    "rl.unjudged": 0.0,
    "rl.truncated": 0.0,
    "rl.repetitive": 0.0,
    "rl.loss": -0.001,
    "rl.grad_norm": 0.3,
    "rl.clip_fraction_positive": 0.05,
    "rl.clip_fraction_negative": 0.1,
    "rl.logprob_drift": 1e-7,
    "rl.logprob_drift_k3": 1e-10,
    "rl.on_policy_ratio_error": 0.0,
    "rl.weight_lag": 0.0,
    "rl.kl_to_reference": 0.01,
}
Change = Callable[[int], Mapping[str, float | None]]


def alarms(
    change: Change, steps: int, config: GuardConfig | None = None, panel: GuardPanel | None = None
) -> list[Alarm]:
    """A healthy run of which some figures are changed, by step."""
    panel = panel or GuardPanel(config or GuardConfig())
    return [alarm for step in range(steps) for alarm in panel.observe(step, HEALTHY | dict(change(step)))]


def first(found: list[Alarm]) -> list[tuple[str, str, int]]:
    return [(alarm.guard, alarm.action, alarm.step) for alarm in found]


def constantly(**figures: float) -> Change:
    return lambda step: {f"rl.{name}": value for name, value in figures.items()}


def after(begin: int, **figures: float) -> Change:
    return lambda step: {f"rl.{name}": value for name, value in figures.items()} if step >= begin else {}


@pytest.mark.parametrize(
    ("change", "steps", "expected"),
    [
        (after(4, kl_to_reference=0.06), 9, [("kl", "warn", 8)]),
        (after(4, kl_to_reference=0.21), 9, [("kl", "stop", 8)]),
        (after(30, kl_to_reference=0.051), 35, [("kl", "stop", 34), ("kl", "warn", 34)]),
        (after(3, logprob_drift_k3=2e-3), 4, [("drift_k3", "warn", 3)]),
        (after(3, logprob_drift_k3=2e-2), 4, [("drift_k3", "stop", 3)]),
        (after(3, logprob_drift=0.04), 4, [("drift", "warn", 3)]),
        (after(3, logprob_drift=0.09), 4, [("drift", "stop", 3)]),
        (after(3, on_policy_ratio_error=1e-4), 4, [("on_policy_ratio", "stop", 3)]),
        (after(3, weight_lag=1), 4, [("stale_weights", "stop", 3)]),
        (after(10, entropy=0.02), 15, [("entropy", "warn", 14)]),
        (after(10, entropy=0.002), 15, [("entropy", "stop", 14)]),
        (constantly(clip_fraction_negative=0.5), 10, [("clip_asymmetry", "warn", 9)]),
        (constantly(clip_fraction_negative=0.95), 10, [("clip_asymmetry", "stop", 9)]),
        (constantly(clip_fraction_positive=0.95, clip_fraction_negative=0.0), 10, [("clip_asymmetry", "stop", 9)]),
        (after(10, tokens=90), 16, [("length", "warn", 12)]),
        (
            after(10, tokens=9),
            16,
            [("length", "stop", 12), ("length", "stop", 13), ("length", "stop", 14), ("length", "stop", 15)],
        ),
        (after(10, thinking_token_ratio=0.05), 16, [("thinking_ratio", "warn", 12)]),
        (after(10, thinking_token_ratio=0.9), 16, [("thinking_ratio", "warn", 12)]),
        (after(10, repetitive=0.2), 13, [("repetition", "warn", 12)]),
        (after(10, repetitive=0.6), 13, [("repetition", "stop", 12)]),
        (after(10, truncated=0.6), 13, [("truncated", "warn", 12)]),
        (after(10, unjudged=0.1), 13, [("unjudged", "warn", 12)]),
        (after(10, unjudged=0.6), 13, [("unjudged", "stop", 12)]),
        (after(10, loss=math.nan), 11, [("non_finite", "stop", 10)]),
        (after(10, anything=-math.inf), 11, [("non_finite", "stop", 10)]),
        (after(10, grad_norm=3.5), 11, [("gradient", "skip_step", 10)]),
    ],
)
def test_a_guard_trips_at_its_threshold(change: Change, steps: int, expected: list[tuple[str, str, int]]):
    assert first(alarms(change, steps)) == expected


@pytest.mark.parametrize(
    "change",
    [
        constantly(),
        constantly(kl_to_reference=0.05),
        lambda step: {"rl.kl_to_reference": 2.0 if step % 5 else 0.01},
        constantly(logprob_drift_k3=1e-3, logprob_drift=0.03, on_policy_ratio_error=1e-5),
        after(10, entropy=0.031),
        lambda step: {"rl.entropy": 0.001 if step % 5 else 0.04},
        after(10, tokens=79),
        after(10, tokens=150, reward=0.6),
        after(10, thinking_token_ratio=0.1),
        constantly(thinking_token_ratio=0.0),
        after(10, grad_norm=2.9),
        lambda step: {"rl.grad_norm": 0.9 if step == 20 else 0.01},
        lambda step: {"rl.truncated": 1.0 if step % 3 else 0.4},
        constantly(unjudged=0.05, repetitive=0.1),
        constantly(clip_fraction_positive=0.6, clip_fraction_negative=0.9),
    ],
)
def test_the_healthy_side_of_each_threshold_is_silent(change: Change):
    assert alarms(change, 60) == []


def test_certainty_that_pays_is_no_collapse():
    def learn(reward: float) -> Change:
        return after(10, entropy=0.001, reward=reward)

    assert alarms(learn(0.8), 30) == [], "more than half of the way from 0.5 to 1"
    assert {alarm.guard for alarm in alarms(learn(0.7), 30)} == {"entropy"}
    start_high = lambda step: {"rl.reward": 0.96} | ({"rl.entropy": 0.001} if step > 9 else {})  # noqa: E731
    assert alarms(start_high, 30) == [], "the reward is as high as it gets"


def test_constant_groups_are_zero_signal_only_where_they_are_not_solved():
    """RL-01: one group all right, one all wrong, five batches in a row."""
    batch = constantly(constant_groups=1.0, solved_groups=0.5)
    # Rewards that differ between steps, or this would be a constant reward.
    unsolved = lambda step: dict(batch(step)) | {"rl.reward": 0.5 + 0.01 * (step % 2)}  # noqa: E731
    assert first(alarms(unsolved, 15)) == [("zero_signal", "warn", 4), ("zero_signal", "stop", 14)]
    solved = lambda step: {"rl.constant_groups": 1.0, "rl.solved_groups": 0.94, "rl.reward": 0.94 + step / 1e4}  # noqa: E731
    assert alarms(solved, 40) == []
    no_count = lambda step: dict(unsolved(step)) | {"rl.solved_groups": None}  # noqa: E731
    assert first(alarms(no_count, 5)) == [("zero_signal", "warn", 4)], "the reward stands in"
    unjudged = lambda step: {"rl.constant_groups": 1.0, "rl.solved_groups": None, "rl.reward": None}  # noqa: E731
    assert first(alarms(unjudged, 5)) == [("zero_signal", "warn", 4)]


@pytest.mark.parametrize(
    ("reward", "expected"), [(1.0, "nothing to teach"), (0.0, "no episode succeeds"), (0.3, "no episode succeeds")]
)
def test_one_reward_for_everybody_stops_the_run(reward: float, expected: str):
    config = GuardConfig.model_validate({"zero_signal": {"warn": None, "stop": None}})
    found = alarms(constantly(constant_groups=1.0, solved_groups=reward, reward=reward), 5, config)
    assert first(found) == [("constant_reward", "stop", 4)]
    assert expected in found[0].fix


def test_full_reward_after_learning_is_success_but_a_verifier_that_dies_is_not():
    done = after(20, constant_groups=1.0, solved_groups=1.0, reward=1.0, entropy=1e-4)
    assert alarms(done, 60) == []
    dead = alarms(after(20, constant_groups=1.0, solved_groups=0.0, reward=0.0), 25)
    assert ("constant_reward", "stop", 24) in first(dead)


def test_all_episodes_truncated_stops_and_undefined_lengths_are_no_zero():
    """RO-03: mean length over finished episodes is undefined then."""
    change = lambda step: {"rl.truncated": 1.0, "rl.tokens": None, "rl.reward": 0.1 * (step % 2)}  # noqa: E731
    found = alarms(change, 3)
    assert first(found) == [("truncated", "stop", 2)]
    assert "stop tokens" in found[0].fix


def test_the_same_warning_comes_at_most_every_twenty_steps_but_worse_comes_at_once():
    found = alarms(constantly(logprob_drift=0.05), 60)
    assert first(found) == [("drift", "warn", 0), ("drift", "warn", 20), ("drift", "warn", 40)]
    flapping = alarms(lambda step: {"rl.logprob_drift": 0.05 if step % 2 else 0.0}, 21)
    assert first(flapping) == [("drift", "warn", 1)]
    worse = alarms(lambda step: {"rl.logprob_drift": 0.05 if step < 5 else 0.1}, 6)
    assert first(worse) == [("drift", "warn", 0), ("drift", "stop", 5)]


def test_lowering_the_learning_rate_is_a_level_like_the_others():
    panel = GuardPanel(GuardConfig.model_validate({"kl": {"lower_lr": 0.1, "jump_action": "off"}}))
    found = alarms(constantly(kl_to_reference=0.15), 26, panel=panel)
    assert first(found) == [("kl", "lower_lr", 4), ("kl", "lower_lr", 24)]
    assert panel.learning_rate_scale == 0.25


def test_a_spiking_update_is_skipped_each_time_said_once_and_stops_when_it_goes_on():
    panel = GuardPanel(GuardConfig())
    assert panel.before_update(0, 1e6, {}) == (), "no median yet"
    alarms(constantly(), 10, panel=panel)
    assert panel.before_update(10, 2.9, {"rl.loss": 0.1}) == ()
    answers = [panel.before_update(10 + i, 40.0, {}) for i in range(5)]
    assert [[alarm.action for alarm in answer] for answer in answers] == [["skip_step"]] * 4 + [["stop", "skip_step"]]
    assert [answer[-1].quiet for answer in answers] == [False, True, True, True, True]
    assert answers[0][0].values == (0.3,) * 10 + (40.0,)
    with pytest.raises(CheckFailed, match="5 updates in a row were skipped"):
        raise_on_stop(answers[-1])
    panel.before_update(15, 0.3, {})
    assert [alarm.action for alarm in panel.before_update(15, 40.0, {})] == ["skip_step"], "a good update resets"


@pytest.mark.parametrize(("norm", "loss"), [(math.nan, 0.0), (math.inf, 0.0), (0.1, math.nan)])
@pytest.mark.parametrize("action", ["stop", "skip_step"])
def test_an_update_with_nan_is_never_made(norm: float, loss: float, action: str):
    panel = GuardPanel(GuardConfig.model_validate({"non_finite": {"action": action}}))
    (alarm,) = panel.before_update(0, norm, {"rl.loss": loss})
    assert (alarm.guard, alarm.action) == ("non_finite", action)


def test_a_stop_says_what_happened_shows_twenty_values_and_proposes_a_fix():
    found = alarms(lambda step: {"rl.kl_to_reference": 0.01 * step}, 26)
    stops = [alarm for alarm in found if alarm.action == "stop"]
    with pytest.raises(CheckFailed) as error:
        raise_on_stop(found)
    text = str(error.value)
    assert "guard kl stopped the run: KL to the reference (k3 per token) is 0.25, above 0.2 for 5 steps" in text
    assert "rl.kl_to_reference, last 20: ▁▁▂▂▂▃▃▄▄▄▅▅▅▆▆▇▇▇██" in text
    assert "\n  0.06 0.07 0.08 " in text
    assert " 0.24 0.25\n" in text
    assert "where: stage rl, step 25" in text
    assert "fix:   lower rl.learning_rate" in text
    assert "last good policy" in text
    assert len(stops[0].values) == 20
    assert stops[0].line().startswith("guard kl (stop) at step 25: ")
    raise_on_stop([alarm for alarm in found if alarm.action == "warn"])


def test_all_stops_of_a_step_are_told():
    found = alarms(constantly(logprob_drift=0.1, weight_lag=2), 1)
    with pytest.raises(CheckFailed, match=r"(?s)guard drift stopped.*guard stale_weights stopped"):
        raise_on_stop(found)


def test_sparkline():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([5, 5]) == "▁▁"
    assert sparkline([0, math.nan, 1, math.inf]) == "▁×█×"
    assert sparkline([-1.7e308, 1.7e308]) == "▁█"
    assert sparkline([]) == ""


def troubled(step: int) -> dict[str, float | None]:
    """A run in which much goes wrong, by and by."""
    return HEALTHY | {
        "rl.kl_to_reference": 0.001 * 1.2**step,
        "rl.entropy": 0.3 * 0.8**step,
        "rl.tokens": 40 + 2.0 * step,
        "rl.grad_norm": 40.0 if step % 17 == 16 else 0.3 + 0.01 * (step % 5),
        "rl.unjudged": 0.1 if step > 30 else None,
        "rl.logprob_drift": 0.04,
    }


@pytest.mark.parametrize("cut", [1, 7, 16, 22, 31, 44])
def test_a_resumed_panel_goes_on_bit_for_bit(cut: int):
    config = GuardConfig.model_validate({"kl": {"lower_lr": 0.1}})

    def play(panel: GuardPanel, steps: range) -> list[tuple[Alarm, ...]]:
        said = []
        for step in steps:
            figures = troubled(step)
            said += [panel.before_update(step, figures["rl.grad_norm"] or 0.0, {}), panel.observe(step, figures)]
        return said

    whole = GuardPanel(config)
    expected = play(whole, range(60))[2 * cut :]
    before, resumed = GuardPanel(config), GuardPanel(config)
    play(before, range(cut))
    state = before.state_dict()
    play(before, range(cut, 60))
    assert json.loads(json.dumps(state)) == state
    file = BytesIO()
    torch.save(state, file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert play(resumed, range(cut, 60)) == expected
    assert resumed.state_dict() == whole.state_dict()
    assert len({(alarm.guard, alarm.action) for answer in expected for alarm in answer}) >= 2
    assert resumed.learning_rate_scale < 1


def test_steps_must_rise():
    panel = GuardPanel(GuardConfig())
    panel.observe(3, HEALTHY)
    with pytest.raises(ValueError, match="step 3 follows step 3"):
        panel.observe(3, HEALTHY)


def test_a_domain_changes_one_limit_and_keeps_the_others():
    config = GuardConfig.model_validate({"kl": {"stop": 0.5}, "length": {"warn": None}})
    assert (config.kl.warn, config.kl.stop, config.kl.patience) == (0.05, 0.5, 5)
    assert (config.length.warn, config.length.stop) == (None, 4.0)
    with pytest.raises(ValidationError, match="warn <= lower_lr <= stop"):
        GuardConfig.model_validate({"kl": {"warn": 0.3}})
    with pytest.raises(ValidationError, match="kl_jump"):
        GuardConfig.model_validate({"kl_jump": 1})
    with pytest.raises(ValidationError):
        GuardConfig.model_validate({"gradient": {"action": "explode"}})


SWITCHED_OFF: dict[str, Any] = {
    "kl": {"warn": None, "stop": None, "jump_action": "off"},
    "entropy": {"warn": None, "stop": None},
    "gradient": {"action": "off"},
    "length": {"warn": None, "stop": None},
    "unjudged": {"warn": None, "stop": None},
    "drift": {"warn": None, "stop": None},
}


def test_guards_can_be_switched_off():
    panel = GuardPanel(GuardConfig.model_validate(SWITCHED_OFF))
    assert [panel.observe(step, troubled(step)) for step in range(60)] == [()] * 60
    assert panel.before_update(60, 1e9, {}) == ()


@pytest.mark.parametrize(("noise", "action"), [(0.09, "stop"), (0.05, "warn")])
def test_a_bypass_under_router_noise_makes_only_positive_episodes_learn(noise: float, action: str):
    """log pi - log mu ~ N(-s²/2, s) on tokens sampled from mu: s 0.09 is a KL of 4e-3, as 1% router flips give."""
    episodes, tokens = 64, 1024
    torch.manual_seed(0)
    panel = GuardPanel(GuardConfig())
    found: list[Alarm] = []
    for step in range(10):
        old = -torch.rand(episodes, tokens)
        live = (old + noise * torch.randn(episodes, tokens) - noise**2 / 2).requires_grad_()
        advantages = torch.tensor([1.0, -1.0]).repeat(episodes // 2)
        mask = torch.ones(episodes, tokens)
        bounds = ClipBounds(torch.full((episodes,), 3e-4), torch.full((episodes,), 4e-4))
        spread = advantages[:, None].expand_as(mask)
        zeroed = gspo(PolicyTerms(live, old, mask, spread, mask / mask.numel()), bounds).zeroed.float().mean(1)
        gap = {
            "rl.clip_fraction_positive": float(zeroed[advantages > 0].mean()),
            "rl.clip_fraction_negative": float(zeroed[advantages < 0].mean()),
        }
        found += panel.observe(step, HEALTHY | gap)
    assert first(found) == [("clip_asymmetry", action, 9)]
    assert "negative episodes hardly teach" in found[0].what


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that has hardly learned anything."""
    tasks, out = toy.tasks(), tmp_path_factory.mktemp("cold")
    config = SFTConfig(max_steps=3, batch_size=8)
    return run_sft(toy.MODEL, config, tasks, toy.demonstrations(tasks), [], toy.runtime(), out, 0, toy.ignore).policy


@pytest.mark.parametrize(
    ("verifier", "expected"),
    [
        (toy.constant, "guard constant_reward stopped the run: every episode of the last 5 steps got the reward 1"),
        (toy.crashing, "guard unjudged stopped the run: the share of unjudged episodes is 1"),
    ],
)
def test_training_without_signal_does_not_go_on(cold: Path, tmp_path: Path, verifier: Any, expected: str):
    """RL-01"""
    guards = GuardConfig.model_validate({"truncated": {"stop": None}})
    config = RLConfig(steps=10, groups=2, group_size=2, max_tokens=8, eval_every=0, guards=guards)
    with pytest.raises(CheckFailed, match=expected):
        run_rl(cold, config, toy.tasks(8), toy.tasks(2), toy.runtime(verifier), tmp_path, 0, toy.ignore)


def test_training_on_episodes_that_are_all_cut_does_not_go_on(cold: Path, tmp_path: Path):
    """RO-03: nothing ends by itself, everything is masked."""
    seen: list[dict[str, float]] = []
    config = RLConfig(
        steps=10, groups=2, group_size=4, max_tokens=2, eval_every=0, length=LengthConfig(truncated="mask")
    )
    with pytest.raises(CheckFailed, match="guard truncated stopped the run: the share of episodes cut"):
        run_rl(
            cold,
            config,
            toy.tasks(8),
            toy.tasks(2),
            toy.runtime(),
            tmp_path,
            0,
            lambda figures, step: seen.append(figures),
        )
    assert [figures["rl.truncated"] for figures in seen] == [1.0, 1.0]
    for figures in seen:
        assert "rl.tokens_untruncated" not in figures
        assert "rl.loss" not in figures
        assert all(math.isfinite(value) for value in figures.values())
