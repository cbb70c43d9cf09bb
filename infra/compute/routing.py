"""Expert choices of a mixture-of-experts model: recorded in one pass, replayed in another.

Near-tied router logits pick other experts after the smallest change of rounding; a trainer then differentiates
another network than the one that sampled. Replay keeps the choice and lets gradients through the gate weights
(rollout routing replay, R3: https://arxiv.org/abs/2510.11370).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from infra.errors import CheckFailed, UsageError

MISSING = -1
"""Expert id of a token whose choice is not known."""


class RoutingRecorder:
    """Collects what the routers of a model choose, forward after forward."""

    def __init__(self, layers: int) -> None:
        self._chosen: list[list[Tensor]] = [[] for _ in range(layers)]

    def add(self, layer: int, experts: Tensor) -> None:
        """Take ``[tokens, top_k]`` expert ids of one layer."""
        self._chosen[layer].append(experts.detach().clone())

    def experts(self) -> Tensor:
        """Expert ids ``[layers, tokens, top_k]`` of all forwards so far, tokens in the order they were computed.

        Raises:
            CheckFailed: nothing was recorded, or not the same tokens in every layer.
        """
        counts = [sum(map(len, chosen)) for chosen in self._chosen]
        if len(set(counts)) != 1 or counts[0] == 0:
            raise CheckFailed(
                f"the routers recorded {counts} tokens, layer by layer",
                where="routing record",
                fix="run the model's own forward once inside record_routing, without activation checkpointing",
            )
        return torch.stack([torch.cat(chosen) for chosen in self._chosen])


@contextmanager
def record_routing(model: nn.Module) -> Iterator[RoutingRecorder]:
    """Record every router's choice in all forwards inside the context.

    Raises:
        UsageError: the model has no routers this module knows.
    """
    routers = _routers(model)
    recorder = RoutingRecorder(len(routers))

    def hook(layer: int) -> Any:
        return lambda module, inputs, output: recorder.add(layer, output[2])

    with _hooked(routers, [hook(layer) for layer in range(len(routers))]):
        yield recorder


@contextmanager
def replay_routing(model: nn.Module, experts: Tensor) -> Iterator[None]:
    """Force recorded choices; gate weights are the softmax of the live logits of the recorded experts.

    Every forward inside the context must be of exactly the recorded tokens, in their order. With activation
    checkpointing the backward belongs inside as well, since it runs the routers again.

    Args:
        experts: ``[layers, tokens, top_k]``; :data:`MISSING` where nothing was recorded.

    Raises:
        UsageError: the model has no routers this module knows.
        CheckFailed: the record lacks a layer or a token, names an expert twice or one that does not exist, or a
            layer was never computed inside the context.
    """
    routers = _routers(model)
    _check(experts, len(routers), routers[0].top_k, routers[0].num_experts)
    replayed = [False] * len(routers)

    def hook(layer: int) -> Any:
        def force(module: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            logits = output[0]
            if len(logits) != experts.shape[1]:
                raise _broken(f"layer {layer} computes {len(logits)} tokens, the record has {experts.shape[1]}")
            replayed[layer] = True
            chosen = experts[layer].to(logits.device, torch.long)
            return logits, logits.gather(1, chosen).softmax(1), chosen

        return force

    with _hooked(routers, [hook(layer) for layer in range(len(routers))]):
        yield
    if not all(replayed):
        raise _broken(f"layers {[i for i, done in enumerate(replayed) if not done]} were not computed by their router")


def mismatch(one: Tensor, other: Tensor) -> float:
    """Share of (layer, token) pairs whose expert sets differ, whatever their order.

    Args:
        one: ``[layers, tokens, top_k]``.
        other: the same tokens in another pass.

    Raises:
        CheckFailed: the shapes differ, or a choice is missing.
    """
    if one.shape != other.shape:
        raise _broken(f"records of shape {list(one.shape)} and {list(other.shape)} cannot be compared")
    if one.numel() == 0 or bool((one < 0).any()) or bool((other < 0).any()):
        raise _broken("choices that are missing cannot be compared")
    return float((one.sort(-1).values != other.sort(-1).values).any(-1).double().mean())


def freeze_routers(model: nn.Module) -> None:
    """Stop training the routers (in place); experts, and all else, are trained as before.

    Raises:
        UsageError: the model has no routers this module knows.
    """
    for router in _routers(model):
        router.requires_grad_(False)


def _routers(model: nn.Module) -> list[Any]:
    """The routers, first layer first; ``forward`` returns (logits, gate weights, expert ids), a row per token."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter

    routers = [module for module in model.modules() if isinstance(module, GptOssTopKRouter)]
    if not routers:
        raise UsageError(
            "the model has no GPT-OSS routers",
            where=type(model).__name__,
            fix="leave routing replay and rl.freeze_router off for this model",
        )
    return routers


@contextmanager
def _hooked(modules: list[Any], hooks: list[Any]) -> Iterator[None]:
    handles = [module.register_forward_hook(hook) for module, hook in zip(modules, hooks, strict=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _check(experts: Tensor, layers: int, top_k: int, count: int) -> None:
    if experts.dim() != 3 or experts.shape[0] != layers or experts.shape[2] != top_k:
        raise _broken(f"the record has shape {list(experts.shape)}, the model needs [{layers}, tokens, {top_k}]")
    ordered = experts.sort(-1).values
    repeated = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    wrong = ((experts < 0) | (experts >= count)).any(-1) | repeated
    if bool(wrong.any()):
        layer, token = wrong.nonzero()[0].tolist()
        raise _broken(
            f"{int(wrong.sum())} of {wrong.numel()} choices are missing or impossible, "
            f"the first is {experts[layer, token].tolist()} at layer {layer}, token {token}"
        )


def _broken(what: str) -> CheckFailed:
    return CheckFailed(
        what,
        where="routing record",
        fix="record all layers and tokens of this very batch, or turn routing replay off",
    )
