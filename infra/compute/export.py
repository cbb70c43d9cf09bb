"""Whole weights out of a model, sharded or not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """All weights as whole CPU tensors on rank 0, an empty dict on the other ranks; every rank must call it.

    Weights that the model ties share one tensor here too. Tensors of an unsharded CPU model are its own, not copies.

    Args:
        model: a plain model, or one under FSDP2 (``fully_shard``).
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(model, options=options)
    first_name: dict[int, str] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        first = first_name.setdefault(id(weight), name)
        if first != name and name in state:  # gathering has made two copies of a tied weight
            state[name] = state[first]
    return state


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Write ``config.json`` and safetensors, readable by ``from_pretrained``; every rank must call it.

    Rank 0 writes, into ``folder`` directly: give a partial folder and rename it. The others return when it is done.
    """
    from transformers.utils.logging import disable_progress_bar

    state = full_state_dict(model)
    if not distributed.is_initialized() or distributed.get_rank() == 0:
        disable_progress_bar()
        model.save_pretrained(folder, state_dict=state)
    if distributed.is_initialized():
        distributed.barrier()
