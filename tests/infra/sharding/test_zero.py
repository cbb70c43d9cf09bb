"""DeepSpeed ZeRO on real gloo ranks against FSDP2 on the same rows."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from infra.compute.sharding.config import ShardingConfig
from infra.compute.sharding.fsdp import clip_gradients, shard
from infra.compute.sharding.mesh import make_mesh
from infra.compute.sharding.zero import ZeroEngine
from infra.errors import UsageError
from tests.infra.sharding.support import adamw, assert_same, loss_of, run_ranks, some_rows, summed, tiny_model, weights

STEPS = 4
CLIP = 0.05
INSTALLED = importlib.util.find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(not INSTALLED, reason="needs DeepSpeed: make test-deepspeed")
TIGHT = 2e-6
"""float32; sums are taken in another order."""


def under_zero(stages: list[tuple[int, bool]]) -> dict[str, Any]:
    share, count = some_rows().share(distributed.get_rank(), distributed.get_world_size()), some_rows().count
    found = {}
    for stage, checkpointed in stages:
        model = tiny_model(dtype=torch.float32)
        config = ShardingConfig(strategy="deepspeed", zero_stage=stage, activation_checkpointing=checkpointed)  # type: ignore[arg-type]
        engine, losses = ZeroEngine(model, adamw(model), config, max_norm=CLIP), []
        for _ in range(STEPS):
            loss = loss_of(engine, share, count)
            engine.backward(loss)
            engine.step()
            losses.append(summed(loss))
        kept = sum(p.numel() for p in model.parameters())  # type: ignore[attr-defined]
        found[f"{stage} {checkpointed}"] = {
            "losses": torch.stack(losses),
            "kept": kept,
            "weights": engine.full_state_dict(),
        }
    return found


def under_fsdp() -> dict[str, Any]:
    share, count = some_rows().share(distributed.get_rank(), distributed.get_world_size()), some_rows().count
    config = ShardingConfig()
    model = shard(tiny_model(dtype=torch.float32), make_mesh(config), config)
    optimizer, losses = adamw(model), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, share, count)
        torch.autograd.backward(loss)
        clip_gradients(model.parameters(), CLIP)
        optimizer.step()
        losses.append(summed(loss))
    return {"losses": torch.stack(losses), "weights": weights(model)}


@pytest.mark.deepspeed
@needs_deepspeed
def test_zero_2_and_3_have_the_losses_and_weights_of_fsdp2(tmp_path: Path) -> None:
    for name in ("fsdp", "zero"):
        (tmp_path / name).mkdir()
    expected = run_ranks(under_fsdp, 2, tmp_path / "fsdp")[0]
    found = run_ranks(under_zero, 2, tmp_path / "zero", [(2, False), (3, False), (3, True)])
    assert float((expected["losses"][0] - expected["losses"][-1]).abs()) > 1e-3
    for name, ours in found[0].items():
        print(f"ZeRO-{name}: losses {ours['losses'].tolist()}, FSDP2: {expected['losses'].tolist()}")
        torch.testing.assert_close(ours["losses"], expected["losses"], rtol=0, atol=TIGHT)
        assert_same(ours["weights"], expected["weights"], TIGHT * 10)
        assert found[1][name]["weights"] == {}
    assert found[0]["3 False"]["kept"] == 0  # between steps the module itself holds no whole weight
    assert found[0]["2 False"]["kept"] == sum(p.numel() for p in tiny_model().parameters())


@pytest.mark.parametrize("part", ["expert", "sequence"])
def test_zero_says_that_it_divides_data_only(part: str) -> None:
    model = tiny_model()
    config = ShardingConfig(strategy="deepspeed", **{part: 2})
    with pytest.raises(UsageError, match="data ranks only"):
        ZeroEngine(model, adamw(model), config)


@pytest.mark.skipif(INSTALLED, reason="DeepSpeed is installed")
def test_zero_without_deepspeed_says_what_to_install() -> None:
    model = tiny_model()
    with pytest.raises(UsageError, match="cannot be imported") as raised:
        ZeroEngine(model, adamw(model), ShardingConfig(strategy="deepspeed"))
    assert "senmon[deepspeed]" in (raised.value.fix or "")
