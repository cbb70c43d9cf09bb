"""Models that no rank holds whole: made on the meta device, divided, then read part by part."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import distributed
from transformers import GptOssForCausalLM

from infra.compute import experts
from infra.compute.sharding.config import ShardingConfig
from infra.compute.sharding.expert import divide_experts
from infra.compute.sharding.fsdp import shard
from infra.compute.sharding.loading import empty_model, load_weights
from infra.compute.sharding.mesh import make_mesh
from infra.errors import CheckFailed
from tests.infra.sharding.support import run_ranks, tiny_config, tiny_model, whole

LARGE = 16 * 2**20
"""Weights of a tied embedding of 64 MB."""


def loaded(folder: str, expert: int) -> dict[str, Any]:
    """How this rank's memory grew at most before it was divided, what it keeps, and what was read."""
    experts.register()
    config = ShardingConfig(expert=expert)
    mesh = make_mesh(config)
    before = psutil.Process().memory_info().rss
    model = empty_model(folder, attn_implementation="eager", experts_implementation=experts.EXPERTS)
    grown = psutil.Process().memory_info().rss - before
    model = shard(model, mesh, config, divide_experts(model, mesh))
    load_weights(model, folder)
    head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
    return {
        "grown": grown,
        "kept": sum(p.to_local().untyped_storage().nbytes() for p in model.parameters()),
        "shared": head.to_local().data_ptr() == embedding.to_local().data_ptr(),
        "sums": {name: whole(p).double().sum() for name, p in model.named_parameters()},
        "buffers": {name: buffer.double().sum() for name, buffer in model.named_buffers()},
    }


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    torch.manual_seed(0)
    GptOssForCausalLM(tiny_config(True, vocab_size=LARGE // 64, hidden_size=64)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("expert", [1, 2])
def test_no_rank_holds_a_tied_model_whole_before_it_is_divided(expert: int, large: Path, tmp_path: Path) -> None:
    """ME-07."""
    model = GptOssForCausalLM.from_pretrained(large, dtype=torch.float32)
    size = sum(p.numel() * 4 for p in model.parameters())
    found = run_ranks(loaded, 2, tmp_path, str(large), expert)
    for rank in found:
        print(f"{size} bytes: {rank['grown']} before division, {rank['kept']} kept")
        assert rank["grown"] < size / 2
        assert size * 0.45 < rank["kept"] < size * 0.55
        assert rank["shared"]
        for name, p in model.named_parameters():
            torch.testing.assert_close(rank["sums"][name], p.detach().double().sum(), rtol=0, atol=1e-9)
        assert rank["buffers"] == {name: buffer.double().sum() for name, buffer in model.named_buffers()}
    assert found[0]["sums"] == found[1]["sums"]


def test_untied_weights_are_read_without_ranks(tmp_path: Path) -> None:
    model = tiny_model(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    other = empty_model(tmp_path)
    load_weights(other, tmp_path)
    state = other.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"num_hidden_layers": 4}, r"\d+ weights are not there, such as model\.layers\.3"),
        ({"hidden_size": 32}, "has shape"),
    ],
)
def test_the_weights_of_another_model_are_refused(overrides: dict[str, int], said: str, tmp_path: Path) -> None:
    tiny_model(dtype=torch.float32).save_pretrained(tmp_path / "stored")
    tiny_config(**overrides).save_pretrained(tmp_path / "other")
    model = empty_model(tmp_path / "other")
    with pytest.raises(CheckFailed) as raised:
        load_weights(model, tmp_path / "stored")
    assert re.search(said, raised.value.what)
    assert str(tmp_path / "stored") in str(raised.value)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    tiny_config().save_pretrained(tmp_path)
    model = empty_model(tmp_path)
    with pytest.raises(CheckFailed, match="not there"):
        load_weights(model, tmp_path)


def test_ranks_need_torchrun_s_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    from infra.compute.sharding.launch import joined_ranks
    from infra.errors import UsageError

    monkeypatch.setenv("RANK", "0")
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not"), joined_ranks():
        pass
    monkeypatch.delenv("RANK")
    with joined_ranks() as alone:
        assert (alone.rank, alone.ranks, alone.restarts) == (0, 1, 0)
    assert not distributed.is_initialized()
