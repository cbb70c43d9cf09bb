"""Models that no rank ever holds whole: built without weights, divided, then filled, each rank reading its own part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from infra.compute.adapters import plain_name
from infra.errors import CheckFailed


def empty_model(folder: str | Path, **settings: Any) -> Any:
    """A causal language model on the meta device (no memory), its buffers computed; tied weights are one already.

    Args:
        folder: with ``config.json``; a local directory, nothing is downloaded.
        settings: for transformers' ``from_config``, such as ``attn_implementation``, ``experts_implementation``.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, **settings)
    model.tie_weights()
    return model


def load_weights(model: nn.Module, folder: str | Path, device: str = "cpu") -> None:
    """Fill a model from safetensors, sharded by :func:`fsdp.shard` or not; every rank must call it.

    Every rank reads the part it keeps, tensor by tensor. Weights still on the meta device are made on ``device``;
    adapters (LoRA), which are in no such folder, must have been made before and stay as they are.

    Raises:
        CheckFailed: a weight is missing in the folder, or has another shape there.
    """
    model._apply(lambda x: torch.empty_like(x, device=device) if x.device.type == "meta" else x)  # type: ignore[no-untyped-call]
    reader = HuggingFaceStorageReader(str(folder))
    stored = reader.read_metadata().state_dict_metadata
    wanted, missing = _wanted(model, set(stored))
    if missing:
        raise CheckFailed(
            f"{len(missing)} weights are not there, such as {missing[0]}",
            where=str(folder),
            fix="give the folder of this very model, unquantised, as save_pretrained writes it",
        )
    wrong = [name for name, weight in wanted.items() if getattr(stored[name], "size", None) != weight.shape]
    if wrong:
        found = list(getattr(stored[wrong[0]], "size", ()))
        raise CheckFailed(
            f"{wrong[0]} has shape {found}, the model needs {list(wanted[wrong[0]].shape)}",
            where=str(folder),
            fix="make the model from the config.json of this folder",
        )
    with torch.no_grad():
        load(dict(wanted), storage_reader=reader, no_dist=not distributed.is_initialized())


def _wanted(model: nn.Module, stored: set[str]) -> tuple[dict[str, Tensor], list[str]]:
    """Weights by the name they have in the folder, each once; and those that have none there."""
    names: dict[int, list[str]] = {}
    weights: dict[int, Tensor] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        if "lora_" not in name:
            names.setdefault(id(weight), []).append(plain_name(name))
            weights[id(weight)] = weight.detach()
    found: dict[str, Tensor] = {}
    missing: list[str] = []
    for key, alternatives in names.items():
        known = [name for name in alternatives if name in stored]
        if known:
            found[known[0]] = weights[key]
        else:
            missing.append(alternatives[0])
    return found, missing
