"""Experts and sequences divided over real gloo ranks, alone and together, against one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from infra.compute.attention.backends import use_sink_attention
from infra.compute.sharding.config import ShardingConfig
from infra.compute.sharding.expert import divide_experts
from infra.compute.sharding.fsdp import clip_gradients, shard
from infra.compute.sharding.mesh import DATA, EXPERT, SEQUENCE, make_mesh
from infra.compute.sharding.sequence import all_columns, divide_rows, divide_sequences, own_columns
from infra.errors import UsageError
from tests.infra.sharding.support import (
    TOLERANCE,
    Rows,
    adamw,
    assert_same,
    gradients,
    loss_of,
    run_ranks,
    some_rows,
    summed,
    tiny_model,
    weights,
)

STEPS, CLIP = 3, 0.05
LAYOUTS = {
    "expert": ShardingConfig(expert=2),
    "sequence": ShardingConfig(sequence=2),
    "both": ShardingConfig(expert=2, sequence=2),
    "checkpointed": ShardingConfig(expert=2, sequence=2, activation_checkpointing=True),
    "expert of 4": ShardingConfig(expert=4),
}
PLANS = {2: ["expert", "sequence"], 4: ["expert", "sequence", "both", "checkpointed", "expert of 4"]}


def parallel_model(config: ShardingConfig, mesh: Any) -> Any:
    model = tiny_model()
    use_sink_attention(model)
    divide_sequences(model, mesh)
    return shard(model, mesh, config, divide_experts(model, mesh))


def parallel_loss(model: Any, rows: Rows, count: int, mesh: Any) -> Tensor:
    """The weighted log-probs of whole rows, each rank of a sequence group computing its piece of them."""
    if mesh[SEQUENCE].size() == 1:
        return loss_of(model, rows, count)
    piece = divide_rows(rows.ids, mesh)
    logits = model(piece.ids, position_ids=piece.positions, segments=piece.segments, use_cache=False).logits
    chosen = logits.log_softmax(-1).gather(-1, piece.targets[..., None])[..., 0]
    whole = all_columns(chosen, mesh, rows.ids.shape[1] - 1)
    return -(rows.weights * whole).sum() / count


def share(rows: Rows, mesh: Any) -> Rows:
    """Rows of this rank's data and expert coordinates."""
    data, expert = mesh[DATA], mesh[EXPERT]
    index = data.get_local_rank() * expert.size() + expert.get_local_rank()
    return rows.share(index, data.size() * expert.size())


def parallel(layouts: list[str]) -> dict[str, Any]:
    found, rows = {}, some_rows(length=13)
    for layout in layouts:
        config = LAYOUTS[layout]
        mesh = make_mesh(config)
        model = parallel_model(config, mesh)
        optimizer = adamw(model)
        kept = sum(p.to_local().numel() for p in model.parameters())
        losses, result = [], {"kept": kept}
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = parallel_loss(model, share(rows, mesh), rows.count, mesh)
            torch.autograd.backward(loss)
            losses.append(summed(loss) / config.sequence)
            if step == 0:
                result["gradients"] = gradients(model)
            result["norm"] = clip_gradients(model.parameters(), CLIP)
            optimizer.step()
        found[layout] = result | {"losses": torch.stack(losses), "weights": weights(model)}
    return found


def alone() -> dict[str, Any]:
    model, rows, losses, result = tiny_model(), some_rows(length=13), [], {}
    optimizer = adamw(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, rows, rows.count)
        torch.autograd.backward(loss)
        losses.append(loss.detach())
        if step == 0:
            result["gradients"] = gradients(model)
        result["norm"] = float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        optimizer.step()
    return result | {"losses": torch.stack(losses), "weights": weights(model)}


@pytest.mark.parametrize("ranks", PLANS)
def test_divided_experts_and_sequences_compute_what_one_rank_computes(ranks: int, tmp_path: Path) -> None:
    expected = alone()
    size = sum(p.numel() for p in tiny_model().parameters())
    found = run_ranks(parallel, ranks, tmp_path, PLANS[ranks])
    for layout in PLANS[ranks]:
        kept = [rank[layout]["kept"] for rank in found]
        print(f"{ranks} ranks, {layout}: {kept} of {size} weights")
        assert max(kept) < size / ranks * 1.1
        for result in (rank[layout] for rank in found):
            torch.testing.assert_close(result["losses"], expected["losses"], rtol=0, atol=TOLERANCE)
            assert result["norm"] == pytest.approx(expected["norm"], rel=1e-9)
            assert_same(result["gradients"], expected["gradients"])
            assert_same(result["weights"], expected["weights"])


def one_sided() -> dict[str, Tensor]:
    """Every token of every rank goes to the experts of rank 0."""
    config, rows = ShardingConfig(expert=2), some_rows()
    mesh = make_mesh(config)
    model = prefer_first_experts()
    model = shard(model, mesh, config, divide_experts(model, mesh))
    torch.autograd.backward(loss_of(model, share(rows, mesh), rows.count))
    return gradients(model)


def prefer_first_experts() -> Any:
    model = tiny_model()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.router.bias.copy_(torch.tensor([50.0, 50.0, 0.0, 0.0]))
    return model


def test_a_rank_whose_experts_get_no_token_has_gradients_of_zero(tmp_path: Path) -> None:
    model, rows = prefer_first_experts(), some_rows()
    torch.autograd.backward(loss_of(model, rows, rows.count))
    expected = gradients(model)
    unused = expected["model.layers.0.mlp.experts.down_proj"][2:]
    assert not unused.any()
    for found in run_ranks(one_sided, 2, tmp_path):
        assert_same(found, expected)


def padded_and_packed() -> dict[str, Tensor]:
    """A padded batch and a packed row, cut in the middle of whatever is there."""
    torch.manual_seed(0)
    mesh = make_mesh(ShardingConfig(sequence=2))
    ids = torch.randint(2, 67, (2, 11))
    mask = torch.ones_like(ids)
    mask[0, :4], mask[1, 8:] = 0, 0
    packed, positions = torch.randint(2, 67, (1, 11)), torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3]])
    found = {}
    for name, rows, settings in (
        ("padded", ids, {"attention_mask": mask}),
        ("packed", packed, {"position_ids": positions}),
    ):
        one, many = tiny_model(), tiny_model()
        use_sink_attention(one)
        divide_sequences(many, mesh)
        piece = divide_rows(rows, mesh, **settings)
        whole = one(rows, use_cache=False, **settings).logits
        part = many(piece.ids, position_ids=piece.positions, segments=piece.segments, use_cache=False).logits
        real = own_columns(settings.get("attention_mask", torch.ones_like(rows)), mesh)
        found[name] = ((part - own_columns(whole, mesh)).abs().amax(-1) * real).max().detach()
        found[f"{name} targets"] = piece.targets - own_columns(torch.nn.functional.pad(rows[:, 1:], (0, 1)), mesh)
    return found


def test_padding_and_packed_rows_keep_their_segments_when_cut(tmp_path: Path) -> None:
    for found in run_ranks(padded_and_packed, 2, tmp_path):
        assert found["padded"] < TOLERANCE
        assert found["packed"] < TOLERANCE
        assert not found["padded targets"].any()


def mistakes() -> dict[str, str]:
    said = {}

    def attempt(name: str, action: Any) -> None:
        try:
            action()
        except UsageError as error:
            said[name] = f"{error.what} {error.where} {error.fix}"

    mesh = make_mesh(ShardingConfig(sequence=2))
    attempt("heads", lambda: divide_sequences(tiny_model(num_key_value_heads=1), mesh))
    model = tiny_model()
    divide_sequences(model, mesh)
    attempt("no segments", lambda: model(torch.ones(1, 4, dtype=torch.long), use_cache=False))
    experts = make_mesh(ShardingConfig(expert=2))
    attempt("experts", lambda: divide_experts(tiny_model(num_local_experts=3), experts))
    attempt("not given", lambda: shard(tiny_model(), experts, ShardingConfig(expert=2)))
    attempt("ranks", lambda: make_mesh(ShardingConfig(expert=3)))
    distributed.barrier()
    return said


def test_what_cannot_be_divided_is_refused_with_a_number_that_can(tmp_path: Path) -> None:
    for said in run_ranks(mistakes, 2, tmp_path):
        assert "1 key/value heads" in said["heads"]
        assert "divide_rows" in said["no segments"]
        assert "divisor of 3" in said["experts"]
        assert "expert-parallel" in said["not given"]
        assert "multiple of 3" in said["ranks"]
