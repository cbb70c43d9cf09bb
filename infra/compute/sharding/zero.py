"""DeepSpeed ZeRO-2 and ZeRO-3, the alternative to FSDP2 (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054).

For teams whose clusters and habits are DeepSpeed's. It divides over data ranks only; experts and sequences are divided
under FSDP2. The extra ``senmon[deepspeed]`` installs it.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, distributed, nn, optim

from infra.compute.sharding.config import ShardingConfig
from infra.compute.sharding.fsdp import transformer_layers
from infra.compute.sharding.recompute import recompute_in_backward
from infra.errors import UsageError


class ZeroEngine:
    """A model under ZeRO: call it as the model, then :meth:`backward` and :meth:`step`. Every rank takes part.

    Losses are divided by the number of tokens of *all* ranks, as under FSDP2, and gradients are added over ranks.

    Args:
        model: a transformers model, the same on all ranks; its weights are divided in place under stage 3.
        optimizer: a torch optimizer over its parameters; its settings, not its states, are taken over.
        config: with ``strategy: deepspeed``.
        max_norm: gradients are scaled down to this global norm at most; None leaves them.

    Raises:
        UsageError: DeepSpeed is not installed, or the config asks for what it does not do.
    """

    def __init__(
        self, model: nn.Module, optimizer: optim.Optimizer, config: ShardingConfig, max_norm: float | None = None
    ) -> None:
        if config.expert > 1 or config.sequence > 1:
            raise UsageError(
                "DeepSpeed divides over data ranks only",
                where="sharding.strategy",
                fix="use strategy fsdp2 for expert or sequence parallel training",
            )
        deepspeed = _import_deepspeed()
        if config.activation_checkpointing:
            for layer in transformer_layers(model):
                recompute_in_backward(layer)
        if not distributed.is_initialized():
            raise UsageError("no ranks were joined", where="sharding", fix="enter launch.joined_ranks() first")
        # torchrun sets it; DeepSpeed will not begin without.
        os.environ.setdefault("LOCAL_RANK", str(torch.cuda.current_device() if torch.cuda.is_available() else 0))
        deepspeed.init_distributed(dist_backend=distributed.get_backend(), verbose=False)
        self._deepspeed, self._stage = deepspeed, config.zero_stage
        self._engine = deepspeed.initialize(
            model=model, optimizer=optimizer, config=_settings(config, max_norm), dist_init_required=False
        )[0]

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        """Forward pass of the model."""
        return self._engine(*arguments, **settings)

    def backward(self, loss: Tensor) -> None:
        """Gradients of this rank's part of the loss, added up over ranks."""
        # DeepSpeed averages over ranks; a sum is what a loss over the tokens of all ranks needs.
        self._engine.backward(loss * distributed.get_world_size())

    def step(self) -> None:
        """Clip, update the weights and forget the gradients."""
        self._engine.step()

    def full_state_dict(self) -> dict[str, Tensor]:
        """All weights as whole CPU tensors on rank 0, an empty dict on the other ranks."""
        state: dict[str, Tensor] = {}
        for name, weight in self._engine.module.named_parameters():
            with self._deepspeed.zero.GatheredParameters([weight], enabled=self._stage == 3):
                if distributed.get_rank() == 0:
                    state[name] = weight.detach().cpu().clone()
        return state


def _settings(config: ShardingConfig, max_norm: float | None) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": config.zero_stage, "overlap_comm": False, "contiguous_gradients": True}
    if config.zero_stage == 3:
        # Small weights are divided too: otherwise tiny models would not be divided at all.
        zero |= {"stage3_param_persistence_threshold": 0}
    if config.offload and torch.cuda.is_available():
        zero |= {"offload_optimizer": {"device": "cpu"}}
        zero |= {"offload_param": {"device": "cpu"}} if config.zero_stage == 3 else {}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "bf16": {"enabled": config.precision == "bfloat16"},
        "gradient_clipping": max_norm or 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
    }


def _import_deepspeed() -> Any:
    """DeepSpeed, prepared for machines without a GPU.

    Raises:
        UsageError: it is not installed.
    """
    cpu = not torch.cuda.is_available()
    if cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
        from deepspeed import ops
    except ImportError as error:
        raise UsageError(
            f"DeepSpeed cannot be imported: {error}",
            where="sharding.strategy",
            fix="pip install 'senmon[deepspeed]', or use strategy fsdp2",
        ) from error
    if cpu:
        # It would compile a shared-memory operation here, and wait for it for ever.
        ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
