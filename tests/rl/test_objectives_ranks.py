"""One rank against two real gloo processes: counts all-reduced, gradients summed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from rl.objectives.aggregation import Normaliser, across_ranks, count, token_weights
from rl.objectives.config import PPO, Aggregation, CriticFree
from tests.rl.objectives import AGGREGATIONS, OBJECTIVES, TOLERANCE, Batch, loss_of, random_batch

ROWS, LENGTH, MAX_LENGTH = 8, 7, 11
RESULTS = "results.pt"
SHARES = {"even": [[0, 2, 4, 6], [1, 3, 5, 7]], "one rank without a policy token": [[1, 2, 3, 4, 5, 6, 7], [0]]}
"""Rows per rank; row 0 of the batch has no policy token."""


def whole_batch() -> tuple[Batch, torch.Tensor]:
    """A batch, and features whose product with shared parameters moves its log-probs and values."""
    generator = torch.Generator().manual_seed(5)
    return random_batch(4, ROWS, LENGTH), torch.randn(ROWS, LENGTH, 3, 2, generator=generator, dtype=torch.float64)


def loss_and_gradient(
    rows: list[int], objective: CriticFree | PPO, aggregation: Aggregation, normaliser: Normaliser
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, features = whole_batch()
    parameters = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64).requires_grad_()
    moved = (features[rows] * parameters[:, None]).sum(-2)
    part = batch.rows(rows)
    fields = {**vars(part), "logprobs": part.logprobs + moved[..., 0], "values": part.values + moved[..., 1]}
    loss = loss_of(Batch(**fields), objective, aggregation, normaliser)
    return loss.detach(), torch.autograd.grad(loss, parameters)[0]


def all_settings() -> list[tuple[str, CriticFree | PPO, Aggregation]]:
    return [(share, o, a) for share in SHARES for o in OBJECTIVES for a in AGGREGATIONS]


def rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    batch, _ = whole_batch()
    results: dict[str, Any] = {}
    for share, objective, aggregation in all_settings():
        rows = SHARES[share][rank]
        normaliser = across_ranks(count(batch.mask[rows], MAX_LENGTH))
        loss, gradient = loss_and_gradient(rows, objective, aggregation, normaliser)
        torch.distributed.all_reduce(loss)
        torch.distributed.all_reduce(gradient)
        results[f"{share} {objective.name} {aggregation}"] = (loss, gradient)
    # RL-09: a row of one token with loss 3 and a row of three tokens that sum to 1.
    mask = torch.tensor([[1.0, 0, 0], [1, 1, 1]], dtype=torch.float64)[rank : rank + 1]
    token_loss = torch.tensor([[3.0, 0, 0], [1 / 3] * 3], dtype=torch.float64)[rank : rank + 1]
    for aggregation in ("token", "gspo"):
        loss = (token_weights(mask, aggregation, across_ranks(count(mask, 3))) * token_loss).sum()
        torch.distributed.all_reduce(loss)
        results[f"RL-09 {aggregation}"] = loss
    if rank == 0:
        torch.save(results, Path(folder) / RESULTS)
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(rank_main, args=(str(folder),), nprocs=2)
    results: dict[str, Any] = torch.load(folder / RESULTS)
    return results


@pytest.mark.parametrize("share", SHARES)
def test_two_ranks_add_up_to_one(two_ranks: dict[str, Any], share: str) -> None:
    """A rank with nothing to train on takes part all the same (RL-07: it neither hangs the others nor counts)."""
    batch, _ = whole_batch()
    for _, objective, aggregation in [s for s in all_settings() if s[0] == share]:
        normaliser = count(batch.mask, MAX_LENGTH)
        loss, gradient = loss_and_gradient(list(range(ROWS)), objective, aggregation, normaliser)
        theirs = two_ranks[f"{share} {objective.name} {aggregation}"]
        torch.testing.assert_close(theirs[0], loss, **TOLERANCE)
        torch.testing.assert_close(theirs[1], gradient, **TOLERANCE)
        assert gradient.abs().sum() > 1e-3


def test_rl_09_the_loss_scale_does_not_depend_on_the_layout(two_ranks: dict[str, Any]) -> None:
    """RL-09: token mean 1.0 (no mean of means), sequence mean 1.667; one piece, two micro-batches, two ranks."""
    mask = torch.tensor([[1.0, 0, 0], [1, 1, 1]], dtype=torch.float64)
    token_loss = torch.tensor([[3.0, 0, 0], [1 / 3] * 3], dtype=torch.float64)
    modes: list[tuple[Aggregation, float]] = [("token", 1.0), ("gspo", 5 / 3)]
    for aggregation, expected in modes:
        whole = (token_weights(mask, aggregation, count(mask, 3)) * token_loss).sum()
        parts = [
            (token_weights(mask[r : r + 1], aggregation, count(mask, 3)) * token_loss[r : r + 1]).sum()
            for r in range(2)
        ]
        for loss in (whole, parts[0] + parts[1], two_ranks[f"RL-09 {aggregation}"]):
            assert loss.item() == pytest.approx(expected, abs=1e-12)


def test_without_a_process_group_counts_stay() -> None:
    assert across_ranks(Normaliser(3, 5, 7)) == Normaliser(3, 5, 7)
