"""FSDP2 on real gloo ranks against one rank."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from infra.compute.sharding.config import ShardingConfig
from infra.compute.sharding.fsdp import clip_gradients, micro_batches, shard
from infra.compute.sharding.mesh import make_mesh
from tests.infra.sharding.support import (
    TOLERANCE,
    adamw,
    assert_same,
    gradients,
    loss_of,
    run_ranks,
    some_rows,
    summed,
    tiny_model,
    train,
    weights,
)

STEPS = 3
CLIP = 0.05
LAYOUTS = {
    "plain": ShardingConfig(),
    "checkpointed": ShardingConfig(activation_checkpointing=True),
    "offload": ShardingConfig(offload=True),
}
PLANS = {
    2: [("plain", False), ("plain", True), ("checkpointed", False), ("offload", False)],
    4: [("plain", True), ("checkpointed", False)],
}


def sharded(tied: bool = False, config: ShardingConfig | None = None, **overrides: Any) -> Any:
    config = config or ShardingConfig()
    return shard(tiny_model(tied=tied, **overrides), make_mesh(config), config)


def one_rank(tied: bool) -> dict[str, Any]:
    """Loss and gradients of all rows, and what AdamW makes of the weights."""
    model, rows = tiny_model(tied=tied), some_rows()
    loss = loss_of(model, rows, rows.count)
    torch.autograd.backward(loss)
    found = {"loss": loss.detach(), "gradients": gradients(model)}
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    found |= {"norm": norm, "clipped": gradients(model)}
    model = tiny_model(tied=tied)
    return found | {"losses": torch.stack(train(model, rows, rows.count, STEPS)), "weights": weights(model)}


def local_bytes(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """What this rank keeps between steps."""

    def size(tensors: Iterable[Tensor]) -> int:
        storages = [tensor.to_local().untyped_storage() for tensor in tensors]  # type: ignore[attr-defined]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    states = [value for state in optimizer.state.values() for value in state.values() if value.dim() > 0]
    return {
        "weights": size(model.parameters()),
        "gradients": size(p.grad for p in model.parameters()),
        "optimizer": size(states),
    }


def divided(plans: list[tuple[str, bool]]) -> dict[str, Any]:
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    rows, found = some_rows(), {}
    share = rows.share(rank, ranks)
    for layout, tied in plans:
        model = sharded(tied, LAYOUTS[layout])
        loss = loss_of(model, share, rows.count)
        torch.autograd.backward(loss)
        result = {"loss": summed(loss), "gradients": gradients(model)}
        result |= {"norm": clip_gradients(model.parameters(), CLIP), "clipped": gradients(model)}
        model = sharded(tied, LAYOUTS[layout])
        losses = torch.stack(train(model, share, rows.count, STEPS))
        found[f"{layout} {tied}"] = result | {"losses": summed(losses), "weights": weights(model)}
    return found


@pytest.mark.parametrize("ranks", PLANS)
def test_loss_gradients_norm_and_trained_weights_are_those_of_one_rank(ranks: int, tmp_path: Path) -> None:
    found = run_ranks(divided, ranks, tmp_path, PLANS[ranks])
    for tied in {tied for _, tied in PLANS[ranks]}:
        expected = one_rank(tied)
        assert float(expected["norm"]) > CLIP
        for layout in [layout for layout, also in PLANS[ranks] if also == tied]:
            for result in (rank[f"{layout} {tied}"] for rank in found):
                torch.testing.assert_close(result["loss"], expected["loss"], rtol=0, atol=TOLERANCE)
                torch.testing.assert_close(result["losses"], expected["losses"], rtol=0, atol=TOLERANCE)
                assert result["norm"] == pytest.approx(float(expected["norm"]), rel=1e-12)
                for part in ("gradients", "clipped", "weights"):
                    assert_same(result[part], expected[part])


def accumulated(idle: int) -> dict[str, Any]:
    """Rank ``idle`` has two rows without a token that counts; the others share the rest, in two micro-batches."""
    rank, rows = distributed.get_rank(), some_rows(6)
    rows.weights[:2] = 0
    share = rows.take([0, 1]) if rank == idle else rows.take([2, 3, 4, 5])
    model, reductions = sharded(), []
    for row in micro_batches(model, range(2)):
        size = len(share.ids) // 2
        torch.autograd.backward(loss_of(model, share.take(range(row * size, (row + 1) * size)), rows.count))
        reductions.append(sum(p.grad is not None for p in model.parameters()))
    return {"gradients": gradients(model), "reductions": reductions, "parameters": len(list(model.parameters()))}


@pytest.mark.parametrize("idle", [0, 1])
def test_a_rank_without_tokens_takes_part_and_micro_batches_are_reduced_once(idle: int, tmp_path: Path) -> None:
    model, rows = tiny_model(), some_rows(6)
    rows.weights[:2] = 0
    torch.autograd.backward(loss_of(model, rows, rows.count))
    for found in run_ranks(accumulated, 2, tmp_path, idle):
        assert_same(found["gradients"], gradients(model))
        assert found["reductions"] == [0, found["parameters"]]


def memory() -> dict[str, int]:
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    model, rows = sharded(), some_rows()
    optimizer = adamw(model)
    torch.autograd.backward(loss_of(model, rows.share(rank, ranks), rows.count))
    optimizer.step()
    return local_bytes(model, optimizer)


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_keeps_its_part_of_weights_gradients_and_optimizer(ranks: int, tmp_path: Path) -> None:
    """Only padding (no size can be divided evenly) keeps it from being exactly one part."""
    whole = sum(p.numel() * p.element_size() for p in tiny_model().parameters())
    for kept in run_ranks(memory, ranks, tmp_path):
        print(f"{ranks} ranks, bytes of {whole} (optimizer: twice): {kept}")
        for part, copies in {"weights": 1, "gradients": 1, "optimizer": 2}.items():
            assert whole * copies / ranks * 0.9 < kept[part] < whole * copies / ranks * 1.15
