"""Checkpoints of sharded models: resharded, atomic, in the background; a killed rank; export."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed
from transformers import AutoModelForCausalLM

from infra.compute.checkpoint import MANIFEST, PARTIAL
from infra.compute.export import full_state_dict, save_model
from infra.compute.sharding import checkpoint as module
from infra.compute.sharding.checkpoint import ShardedCheckpoints
from infra.compute.sharding.config import ShardingConfig
from infra.compute.sharding.expert import divide_experts
from infra.compute.sharding.fsdp import shard
from infra.compute.sharding.mesh import DATA, EXPERT, make_mesh
from infra.errors import CheckFailed
from infra.seeds import random_states, restore_random_states
from tests.infra.sharding.support import (
    TOLERANCE,
    Rows,
    adamw,
    assert_same,
    loss_of,
    run_ranks,
    some_rows,
    tiny_model,
    weights,
)

ROOT = Path(__file__).parents[3]


def step(model: Any, optimizer: torch.optim.Optimizer, rows: Rows, mesh: Any) -> None:
    index = mesh[DATA].get_local_rank() * mesh[EXPERT].size() + mesh[EXPERT].get_local_rank()
    optimizer.zero_grad()
    share = rows.share(index, distributed.get_world_size())
    torch.autograd.backward(loss_of(model, share, rows.count))
    optimizer.step()


def made(config: ShardingConfig, seed: int = 0, tied: bool = False) -> tuple[Any, Any, Any]:
    mesh = make_mesh(config)
    model = tiny_model(seed, tied=tied)
    model = shard(model, mesh, config, divide_experts(model, mesh))
    return model, adamw(model), mesh


def go_on(folder: Path, steps: list[int], expert: int, tied: bool) -> dict[str, Any]:
    """Load what is there into other weights, take the steps, save after the last."""
    model, optimizer, mesh = made(ShardingConfig(expert=expert), seed=steps[0], tied=tied)
    saved = ShardedCheckpoints(folder)
    loaded = saved.load(model, optimizer)
    found: dict[str, Any] = {"step": None if loaded is None else loaded.step}
    found["shared"] = loaded.shared if loaded else None
    found["own"] = loaded.own if loaded else None
    for number in steps:
        step(model, optimizer, some_rows(seed=number), mesh)
    own = {"rank": distributed.get_rank()}
    saved.save(steps[-1], model, optimizer, {"last": steps[-1]}, own, wait=True)
    saved.close()
    return found | {"weights": weights(model)}


@pytest.mark.parametrize(("expert", "tied"), [(1, False), (1, True), (2, False)])
def test_two_ranks_then_one_then_two_go_on_as_one_would(expert: int, tied: bool, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for name in "abc":
        (tmp_path / name).mkdir()
    run_ranks(go_on, 2, tmp_path / "a", folder, [0, 1], expert, tied)
    (alone,) = run_ranks(go_on, 1, tmp_path / "b", folder, [2], 1, tied)
    last = run_ranks(go_on, 2, tmp_path / "c", folder, [3], expert, tied)
    model = tiny_model(tied=tied)
    optimizer = adamw(model)
    for number in range(4):
        optimizer.zero_grad()
        rows = some_rows(seed=number)
        torch.autograd.backward(loss_of(model, rows, rows.count))
        optimizer.step()
    assert (alone["step"], alone["shared"], alone["own"]) == (1, {"last": 1}, None)
    for found in last:
        assert (found["step"], found["own"]) == (2, None)
        assert_same(found["weights"], weights(model), TOLERANCE * 10)


def survivors(folder: Path) -> dict[str, Any]:
    """Saves in the background; one fails on rank 1; what is loaded afterwards."""
    model, optimizer, mesh = made(ShardingConfig())
    saved = ShardedCheckpoints(folder)
    step(model, optimizer, some_rows(), mesh)
    before, state = weights(model), random_states()
    saved.save(1, model, optimizer, own={"random": state})
    step(model, optimizer, some_rows(seed=1), mesh)  # goes on while the save does
    drawn = torch.rand(3)
    saved.wait()
    if distributed.get_rank() == 1:
        module.write_state = full_disk
    saved.save(2, model, optimizer)
    said = []
    try:
        saved.wait()
    except CheckFailed as error:
        said = [error.what, error.fix]
    loaded = saved.load(model, optimizer)
    assert loaded is not None
    assert loaded.own is not None
    restore_random_states(loaded.own["random"])
    saved.close()
    return {
        "step": loaded.step,
        "said": said,
        "before": before,
        "after": weights(model),
        "drawn": torch.equal(drawn, torch.rand(3)),
    }


def full_disk(path: Path, state: Any) -> None:
    raise OSError(28, "No space left on device")


def test_background_saves_hold_the_moment_and_one_rank_s_full_disk_fails_all(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for found in run_ranks(survivors, 2, tmp_path, folder):
        assert found["step"] == 1
        assert "step 2 could not be written: No space left on device" in found["said"][0]
        assert found["drawn"]
        assert_same(found["after"], found["before"], 0.0)
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]


def load_newest(folder: Path) -> int | None:
    model, optimizer, _ = made(ShardingConfig())
    loaded = ShardedCheckpoints(folder).load(model, optimizer)
    return None if loaded is None else loaded.step


def test_incomplete_and_damaged_checkpoints_are_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for name in ("a", "b", "c", "d"):
        (tmp_path / name).mkdir()
    run_ranks(go_on, 2, tmp_path / "a", folder, [1], 1, False)
    run_ranks(go_on, 2, tmp_path / "b", folder, [2], 1, False)
    (folder / f"step-00000003{PARTIAL}").mkdir()
    part = next((folder / "step-00000002").glob("__1_*"))
    assert part.name in json.loads((folder / "step-00000002" / MANIFEST).read_text())["files"]
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    assert run_ranks(load_newest, 2, tmp_path / "c", folder) == [1, 1]
    (folder / "step-00000001" / ".metadata").write_bytes(b"")
    with pytest.raises(Exception, match="no checkpoint can be used"):
        run_ranks(load_newest, 2, tmp_path / "d", folder)


def torchrun(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done = subprocess.run(
        [*command, "-m", "tests.infra.sharding.elastic", str(folder), *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_rank_killed_within_a_step_costs_nothing(tmp_path: Path) -> None:
    torchrun(tmp_path / "calm")
    said = torchrun(tmp_path / "killed", "--kill-at", "4")
    assert "restart 1 goes on after step" in said
    calm, killed = (torch.load(tmp_path / name / "final.pt") for name in ("calm", "killed"))
    assert calm.keys() == killed.keys()
    assert all(torch.equal(calm[name], killed[name]) for name in calm)


def exported(folder: str) -> None:
    model, optimizer, mesh = made(ShardingConfig(expert=2), tied=True)
    step(model, optimizer, some_rows(), mesh)
    state = full_state_dict(model)
    if distributed.get_rank() == 0:
        torch.save(state, Path(folder) / "expected.pt")
    save_model(model, Path(folder) / "model")


def test_a_divided_tied_model_is_exported_as_plain_safetensors(tmp_path: Path) -> None:
    run_ranks(exported, 2, tmp_path, str(tmp_path))
    expected = torch.load(tmp_path / "expected.pt")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert "lm_head.weight" not in stored
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64, attn_implementation="eager")
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert_same(dict(model.state_dict()), expected, 0.0)
    reference = tiny_model(tied=True)
    optimizer, rows = adamw(reference), some_rows()
    torch.autograd.backward(loss_of(reference, rows, rows.count))
    optimizer.step()
    assert_same(dict(model.state_dict()), dict(reference.state_dict()))
