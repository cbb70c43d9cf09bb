"""Whole weights out of two real gloo processes that hold halves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from safetensors import safe_open
from torch.distributed.fsdp import fully_shard
from transformers import GptOssConfig, GptOssForCausalLM

from infra.compute.average import WeightAverage
from infra.compute.export import full_state_dict, save_model

VOCABULARY, HIDDEN = 96, 16
RATE = 0.1


def tiny(tied: bool) -> Any:
    config = GptOssConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=tied,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = GptOssForCausalLM._from_config(config, attn_implementation="eager", experts_implementation="eager")
    return model.float()


def ids() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(9))


def train_step(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    logits = model(input_ids=ids(), use_cache=False).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids()[:, 1:].flatten()).backward()
    optimizer.step()


def rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    results: dict[str, Any] = {}
    for tied in (True, False):
        model = tiny(tied)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        average = WeightAverage(model, 0.5)
        train_step(model)
        average.update()
        with torch.no_grad():
            results[f"logits {tied}"] = model(input_ids=ids(), use_cache=False).logits
        save_model(model, Path(folder) / f"saved-{tied}")
        assert (Path(folder) / f"saved-{tied}" / "model.safetensors").is_file(), "written when save_model returns"
        results[f"state {tied}"] = full_state_dict(model)
        with average.applied():
            results[f"average {tied}"] = full_state_dict(model)
        results[f"live {tied}"] = full_state_dict(model)
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    mp.spawn(rank_main, args=(str(folder),), nprocs=2)
    return folder


def results_of(saved: Path, rank: int) -> dict[str, Any]:
    results: dict[str, Any] = torch.load(saved / f"rank{rank}.pt")
    return results


def stored_shapes(folder: Path) -> dict[str, list[int]]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_slice(name).get_shape() for name in list(file.keys())}


@pytest.mark.parametrize("tied", [True, False])
def test_ck_03_a_tied_model_saved_from_shards_is_tied_when_reloaded(saved: Path, tied: bool) -> None:
    """CK-03: one matrix for embedding and head, in memory and on disk; logits to 1e-6; no key missing."""
    folder = saved / f"saved-{tied}"
    model, info = GptOssForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert (model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) is tied
    with torch.no_grad():
        logits = model(input_ids=ids(), use_cache=False).logits
    torch.testing.assert_close(logits, results_of(saved, 0)[f"logits {tied}"], rtol=0, atol=1e-6)
    shapes = stored_shapes(folder)
    assert list(shapes.values()).count([VOCABULARY, HIDDEN]) == (1 if tied else 2)
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert weights < (folder / "model.safetensors").stat().st_size < weights + 4 * VOCABULARY * HIDDEN
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["GptOssForCausalLM"]


@pytest.mark.parametrize("tied", [True, False])
def test_the_whole_state_equals_training_in_one_process_and_only_rank_0_has_it(saved: Path, tied: bool) -> None:
    alone = tiny(tied)
    train_step(alone)
    expected = alone.state_dict()
    state = results_of(saved, 0)[f"state {tied}"]
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        assert type(tensor) is torch.Tensor
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6, msg=name)
    moved = (state["lm_head.weight"] - tiny(tied).lm_head.weight).abs().max()
    assert moved > 1e-3, "the step changed the weights"
    assert results_of(saved, 1)[f"state {tied}"] == {}


def test_the_weight_average_works_on_shards(saved: Path) -> None:
    results = results_of(saved, 0)
    first = tiny(True).state_dict()
    for name, live in results["state True"].items():
        torch.testing.assert_close(results["average True"][name], (first[name] + live) / 2, rtol=0, atol=1e-6)
        assert torch.equal(results["live True"][name], live), "put back bit for bit"


def test_without_a_process_group_it_is_the_models_own_state(tmp_path: Path) -> None:
    model = tiny(True)
    state = full_state_dict(model)
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in state.items())
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    save_model(model, tmp_path)
    assert "lm_head.weight" not in stored_shapes(tmp_path)
    reloaded = GptOssForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(tensor, reloaded[name]) for name, tensor in state.items())
