"""A training run for torchrun: ``python -m torch.distributed.run … -m tests.infra.sharding.elastic FOLDER``.

Eight steps with dropout-like noise from each rank's own random state, a checkpoint every second step. ``--kill-at``:
on its first life, rank 1 kills itself in that step, after its gradients and before the weights change.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch

from infra.compute.export import full_state_dict
from infra.compute.sharding.checkpoint import ShardedCheckpoints
from infra.compute.sharding.config import ShardingConfig
from infra.compute.sharding.fsdp import shard
from infra.compute.sharding.launch import joined_ranks
from infra.compute.sharding.mesh import make_mesh
from infra.seeds import random_states, restore_random_states
from tests.infra.sharding.support import adamw, loss_of, some_rows, tiny_model

STEPS = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kill-at", type=int)
    arguments = parser.parse_args()
    with joined_ranks() as me:
        config = ShardingConfig()
        model = shard(tiny_model(dtype=torch.float32), make_mesh(config), config)
        optimizer = adamw(model)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
        torch.manual_seed(me.rank)
        checkpoints = ShardedCheckpoints(arguments.folder / "checkpoints")
        loaded = checkpoints.load(model, optimizer)
        if loaded is not None:
            assert loaded.own is not None
            restore_random_states(loaded.own["random"])
            schedule.load_state_dict(loaded.shared["schedule"])
            if me.rank == 0:
                print(f"restart {me.restarts} goes on after step {loaded.step}", flush=True)
        for step in range(loaded.step if loaded else 0, STEPS):
            rows = some_rows(seed=step)
            share = rows.share(me.rank, me.ranks)
            share.weights.mul_(torch.rand(share.weights.shape) < 0.8)
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(model, share, rows.count))
            if step == arguments.kill_at and me.rank == 1 and me.restarts == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            schedule.step()
            if step % 2 == 1:
                own = {"random": random_states()}
                checkpoints.save(step + 1, model, optimizer, {"schedule": schedule.state_dict()}, own)
        checkpoints.close()
        state = full_state_dict(model)
        if me.rank == 0:
            torch.save(state, arguments.folder / "final.pt")


if __name__ == "__main__":
    main()
