"""A run that is killed at any moment and resumed is the run that was never interrupted, bit for bit."""

from __future__ import annotations

import copy
import itertools
import json
import math
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from infra.compute.policy import load_policy, policy_hash
from infra.seeds import random_states, restore_random_states
from rl.config import RLConfig
from rl.sampler import TaskSampler
from rl.schedule import learning_rate
from rl.stage import run_rl
from rl.trainer import Trainer
from tests import toy
from tests.rl.cold import CONFIG, cold_policy

STEPS, CHECKPOINT_EVERY = 34, 3
EVERYTHING: dict[str, Any] = {
    "average": 0.9,
    "entropy": {"largest": 0.05, "share": 0.9},
    "kl": {"coefficient": 0.01},
    "length": {"overlong_cache": 6, "overlong_penalty": 0.1, "ngram_penalty": 0.05},
    "correction": {"weights": "token_tis"},
    "clip": {"low": 0.03, "high": 0.04, "modulation_high": 1.0},
    "sampling_rounds": 2,
    "schedule": "cosine",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "everything": EVERYTHING,
    "ppo": {"objective": {"name": "ppo"}},
    "lora": {"lora": {"rank": 4, "alpha": 8}, "average": 0.9, "learning_rate": 5e-3},
}


def settings(name: str) -> RLConfig:
    changes = SETTINGS[name] | {"steps": STEPS, "checkpoint_every": CHECKPOINT_EVERY, "eval_every": 8}
    return RLConfig.model_validate(CONFIG.model_dump(mode="json") | changes)


def train(name: str, out: Path) -> Path:
    """Run (or resume) in this process; every step's figures are appended to ``out/steps.jsonl`` and flushed."""
    out.mkdir(exist_ok=True)
    tasks = toy.tasks()
    with (out / "steps.jsonl").open("a") as log:

        def write(figures: dict[str, float], step: int) -> None:
            log.write(json.dumps({"step": step, **{key: value.hex() for key, value in figures.items()}}) + "\n")
            log.flush()

        return run_rl(cold_policy(), settings(name), tasks[:30], tasks[30:], toy.runtime(), out, 0, write).policy


def steps(out: Path) -> dict[int, dict[str, Any]]:
    """What was logged per step; of a step that was run twice, both must agree."""
    rows: dict[int, dict[str, Any]] = {}
    for line in (out / "steps.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert rows.setdefault(row["step"], row) == row, f"step {row['step']} ran twice and differed"
    return rows


def kill_at(name: str, out: Path, step: int, seconds: float) -> None:
    """Train in a process of its own and end it with SIGKILL ``seconds`` after it logged ``step``."""
    process = multiprocessing.get_context("fork").Process(target=train, args=(name, out))
    process.start()
    deadline = time.monotonic() + 120
    log = out / "steps.jsonl"
    while not (log.exists() and len(log.read_text().splitlines()) >= step):
        assert process.is_alive(), "ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    time.sleep(seconds)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("name", SETTINGS)
def test_a_killed_run_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    cold_policy()
    whole = train(name, tmp_path / "whole")
    history = steps(tmp_path / "whole")
    assert sorted(history) == list(range(1, STEPS + 1))
    assert sum(float.fromhex(row.get("rl.updates", "0x0p+0")) for row in history.values()) > STEPS, "signal"
    rng = random.Random(time.time_ns())
    step, wait = rng.randint(4, STEPS - 20), rng.random() * 0.2
    print(f"killed {wait:.3f} s after step {step}")
    kill_at(name, tmp_path / "cut", step, wait)
    resumed = train(name, tmp_path / "cut")
    again = steps(tmp_path / "cut")
    assert again == history
    assert policy_hash(resumed) == policy_hash(whole)
    before, after = load_policy(cold_policy()).model.state_dict(), load_policy(resumed).model.state_dict()
    assert any(not torch.equal(tensor, after[key]) for key, tensor in before.items()), "it must have learned"


def test_resuming_in_the_middle_of_everything_keeps_every_piece_of_state() -> None:
    """Controllers, guards, sampler and random states are those of the run that went on."""
    config, tasks = settings("everything"), toy.tasks()[:30]

    def fresh() -> Trainer:
        return Trainer(load_policy(cold_policy()), config, tasks, toy.runtime(), 0)

    one = fresh()
    for _ in range(3):
        one.train_step()
    saved = copy.deepcopy(one.state())
    two = fresh()
    two.load_state(saved)
    for key in ("step", "alarms", "sampler", "floor", "panel", "watch"):
        assert two.state()[key] == saved[key], key
    assert saved["sampler"]["position"] > 0
    assert saved["floor"]["target"] is not None
    assert one.train_step() == two.train_step()


def test_ck_07_random_states_of_python_numpy_and_torch_come_back() -> None:
    """CK-07: whatever tools and verifiers draw from the global generators goes on where it was."""

    def draw() -> tuple[float, float, float, float]:
        return random.random(), random.gauss(0, 1), float(numpy.random.rand()), float(torch.rand(1))

    draw()
    kept = random_states()
    expected = [draw() for _ in range(3)]
    restore_random_states(kept)
    assert [draw() for _ in range(3)] == expected


def test_ck_05_a_resume_at_the_border_of_an_epoch_goes_through_the_next_one() -> None:
    """CK-05: 60 batches an epoch; a resume after batch 60 sees all 60 batches of the second epoch once."""
    one = TaskSampler(240, seed=3)
    first = [one.take(4) for _ in range(60)]
    two = TaskSampler(240, seed=3)
    two.load_state_dict(one.state_dict())
    second = [two.take(4) for _ in range(60)]
    everything = list(range(240))
    assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second)) == everything
    assert first != second
    assert second == [one.take(4) for _ in range(60)]
    assert two.position == 480


def test_ck_08_the_learning_rate_is_a_function_of_the_step() -> None:
    """CK-08: warm-up 10, cosine over 100; step 51 has the same rate whatever came before."""
    config = RLConfig(steps=100, warmup_steps=10, schedule="cosine", final_learning_rate=0.0, learning_rate=1e-3)
    assert learning_rate(config, 0) == pytest.approx(1e-4)
    assert learning_rate(config, 50) == pytest.approx(1e-3 * (1 + math.cos(math.pi / 2)) / 2, rel=1e-9)
    rates = [learning_rate(config, step) for step in range(100)]
    assert max(rates) == rates[9]
    assert rates[99] < 1e-6
    linear = config.model_copy(update={"schedule": "linear", "final_learning_rate": 0.1})
    assert learning_rate(linear, 50) == pytest.approx(1e-3 * 0.55)
    assert learning_rate(linear.model_copy(update={"schedule": "constant"}), 99) == 1e-3


def test_the_optimizers_step_counter_comes_back() -> None:
    """CK-08: Adam's bias correction depends on it."""
    one = Trainer(load_policy(cold_policy()), CONFIG, toy.tasks()[:30], toy.runtime(), 0)
    one.train_step()
    two = Trainer(load_policy(cold_policy()), CONFIG, toy.tasks()[:30], toy.runtime(), 0)
    two.load_state(one.state())
    counters = {int(entry["step"]) for entry in two.learner.optimizer.state_dict()["state"].values()}
    assert counters == {one.learner.updates}
