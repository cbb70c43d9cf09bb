"""LoRA through peft under FSDP2, computation in bfloat16, and recomputation with tied routers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from infra.compute.adapters import LoraSettings, add_adapters, merged_state
from infra.compute.sharding.config import ShardingConfig
from infra.compute.sharding.fsdp import clip_gradients, shard
from infra.compute.sharding.mesh import make_mesh
from infra.compute.sharding.recompute import recompute_in_backward
from tests.infra.sharding.support import (
    assert_same,
    gradients,
    loss_of,
    run_ranks,
    some_rows,
    summed,
    tiny_model,
    train,
)

SETTINGS = LoraSettings(rank=4, alpha=8)
STEPS = 2


def adapted() -> Any:
    """float64 throughout, with adapters that already change something."""
    model = add_adapters(tiny_model(), SETTINGS, seed=5).double()
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.copy_(0.1 * torch.randn(p.shape, generator=generator))
    return model


def divided_adapters(checkpointed: bool) -> dict[str, Any]:
    rows = some_rows()
    share = rows.share(distributed.get_rank(), distributed.get_world_size())
    config = ShardingConfig(activation_checkpointing=checkpointed)
    mesh = make_mesh(config)
    model = shard(adapted(), mesh, config)
    loss = loss_of(model, share, rows.count)
    torch.autograd.backward(loss)
    found = {"loss": summed(loss), "gradients": gradients(model)}
    found["norm"] = clip_gradients(model.parameters(), 1e9)
    model = shard(adapted(), mesh, config)
    train(model, share, rows.count, STEPS)
    return found | {"merged": merged_state(model)}


@pytest.mark.parametrize("checkpointed", [False, True])
def test_adapters_under_fsdp2_are_those_of_one_rank(checkpointed: bool, tmp_path: Path) -> None:
    model, rows = adapted(), some_rows()
    loss = loss_of(model, rows, rows.count)
    torch.autograd.backward(loss)
    expected, norm = gradients(model), torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    model = adapted()
    train(model, rows, rows.count, STEPS)
    first, second = run_ranks(divided_adapters, 2, tmp_path, checkpointed)
    for found in (first, second):
        torch.testing.assert_close(found["loss"], loss.detach(), rtol=0, atol=1e-10)
        assert found["gradients"].keys() == {n for n, p in model.named_parameters() if "lora_" in n}
        assert_same(found["gradients"], expected)
        assert found["norm"] == pytest.approx(float(norm), rel=1e-10)
    assert_same(first["merged"], {name: tensor.clone() for name, tensor in merged_state(model).items()})
    assert second["merged"] == {}


def half(model_dtype: torch.dtype) -> dict[str, Any]:
    rows = some_rows()
    share = rows.share(distributed.get_rank(), distributed.get_world_size())
    config = ShardingConfig(precision="bfloat16")
    model = shard(tiny_model(dtype=model_dtype), make_mesh(config), config)
    seen = []
    model.model.layers[1].mlp.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].dtype))
    loss = loss_of(model, share, rows.count)
    torch.autograd.backward(loss)
    return {"loss": summed(loss), "gradients": gradients(model), "seen": seen}


def test_bfloat16_computes_so_and_keeps_float32_weights_and_gradients(tmp_path: Path) -> None:
    model, rows = tiny_model(dtype=torch.float32), some_rows()
    loss = loss_of(model, rows, rows.count)
    torch.autograd.backward(loss)
    expected = torch.cat([g.flatten() for g in gradients(model).values()])
    for found in run_ranks(half, 2, tmp_path, torch.float32):
        assert found["seen"] == [torch.bfloat16]
        assert all(g.dtype == torch.float32 for g in found["gradients"].values())
        ours = torch.cat([g.flatten() for g in found["gradients"].values()])
        torch.testing.assert_close(found["loss"], loss.detach(), rtol=0, atol=0.02)
        assert float(torch.nn.functional.cosine_similarity(ours, expected, dim=0)) > 0.99


def router_gradients(model: Any, checkpointed: bool) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Gradients, and the expert ids of every pass of every router."""
    seen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.router.register_forward_hook(lambda _, __, out: seen.append(out[-1].clone()))
        if checkpointed:
            recompute_in_backward(layer)
    rows = some_rows()
    torch.autograd.backward(loss_of(model, rows, rows.count))
    return gradients(model), seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("difference", [0.0, 2**-9])
def test_recomputation_visits_the_experts_of_the_forward_pass(dtype: torch.dtype, difference: float) -> None:
    """ME-05: router logits of experts 1 and 2 (nearly) tied, top-1."""

    def tied() -> Any:
        model = tiny_model(dtype=dtype, num_experts_per_tok=1)
        with torch.no_grad():
            for layer in model.model.layers:
                router = layer.mlp.router
                router.weight[2] = router.weight[1]
                router.bias[1:3] = torch.tensor([5.0, 5.0 + difference]).to(dtype)
        return model

    expected, once = router_gradients(tied(), False)
    found, twice = router_gradients(tied(), True)
    layers = len(once)
    assert len(twice) == 2 * layers
    assert {1, 2} & set(torch.cat([ids.flatten() for ids in once]).tolist())
    for layer in range(layers):
        again = twice[2 * layers - 1 - layer]  # the backward pass meets the last layer first
        assert torch.equal(once[layer], twice[layer])
        assert torch.equal(once[layer], again)
    assert_same(found, expected, 1e-5)
