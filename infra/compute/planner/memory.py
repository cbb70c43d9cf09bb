"""Bytes on one GPU at the moments of a step that can be its peak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from infra.compute.linear_logprobs import VOCAB_CHUNK
from infra.compute.planner.activations import (
    WIDE,
    block_bytes,
    ends_kept,
    kv_bytes,
    layer_bytes,
    logits_bytes,
)
from infra.compute.planner.models import ModelShape
from infra.compute.planner.request import PlanRequest


@dataclass(frozen=True)
class Parts:
    """Bytes on one GPU."""

    weights: int = 0
    """Of this rank, and RL's frozen reference and the rollout engine's own copies."""
    gradients: int = 0
    """Sums of the micro-batches so far."""
    optimizer: int = 0
    """AdamW's two moments, and its working copy while it steps."""
    gathered_weights: int = 0
    """Whole weights of the layer that computes and of the next one, or of embedding or head."""
    unsharded_gradients: int = 0
    """New gradients of the unit whose backward pass runs, before they are added to the sums."""
    activations: int = 0
    """Kept for the backward pass, and alive in the layer that computes."""
    kv_cache: int = 0
    logits: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(asdict(self).values())

    def plus(self, **more: int) -> Parts:
        """With bytes added to some parts."""
        return replace(self, **{name: value + asdict(self)[name] for name, value in more.items()})


@dataclass(frozen=True)
class Moment:
    """A point of the step, and what is in memory then."""

    name: str
    parts: Parts


def moments(model: ModelShape, request: PlanRequest) -> list[Moment]:
    """All moments that can be the peak, with gradients of earlier micro-batches and optimizer states from the start.

    Raises:
        UsageError: the ranks cannot be divided as asked.
    """
    request.check(model)
    if request.mode == "infer":
        return [_inference(model, request)]
    return list(_training(model, request))


def host_bytes(model: ModelShape, request: PlanRequest) -> int:
    """What offloading keeps in host memory for each rank."""
    if not _offloaded(request):
        return 0
    rest = _at_rest(model, replace(request, sharding=request.sharding.model_copy(update={"offload": False})))
    return rest.total - rest.kv_cache


def _offloaded(request: PlanRequest) -> bool:
    return request.sharding.offload and not request.gpus.cpu and request.mode != "infer"


def _trained(model: ModelShape, request: PlanRequest) -> tuple[float, int]:
    """Parameters a rank trains, and bytes of each: adapters are float32."""
    if request.mode == "lora":
        return model.lora_per_rank * request.lora_rank / request.gpus.count, WIDE
    return model.total / request.gpus.count, request.master


def _at_rest(model: ModelShape, request: PlanRequest) -> Parts:
    """What is in memory from one step to the next. Each rank holds ``1 / ranks`` of every weight."""
    shard = model.total / request.gpus.count * request.master
    weights = shard
    cache = 0
    if request.mode in ("rl", "lora"):
        cache = kv_bytes(model, request)
        if request.gpus.count == 1:
            weights += model.engine_copies * request.master
        if request.mode == "rl" or request.gpus.count == 1:
            weights += shard  # the reference; with adapters the model that the engine serves
    number, size = _trained(model, request)
    if request.mode == "lora":
        weights += number * size
    if _offloaded(request):
        return Parts(kv_cache=cache)
    return Parts(
        weights=round(weights),
        gradients=round(number * size),
        optimizer=round(2 * number * size),
        kv_cache=cache,
    )


def _gathered(model: ModelShape, request: PlanRequest) -> tuple[int, int, int]:
    """Bytes of a gathered layer, of the embedding or head, and of what stays gathered with the root."""
    if not request.gathers:
        return 0, 0, 0
    c = request.compute
    layer = (model.layer - model.layer_experts + model.layer_experts // request.sharding.expert) * c
    ends = model.ends * c
    return (layer, 0, ends) if model.tied else (layer, ends, 0)


def _inference(model: ModelShape, request: PlanRequest) -> Moment:
    """A forward pass over whole sequences that fills the cache of keys and values, then the last tokens' logits."""
    layer, ends, root = _gathered(model, request)
    each = layer_bytes(model, request)
    working = request.tokens * (each.forward + ends_kept(model, request) // 4)
    parts = Parts(
        weights=round(model.total / request.gpus.count * request.master),
        kv_cache=kv_bytes(model, request),
        gathered_weights=max(min(2, model.layers) * layer, layer + ends) + root,
        activations=working + block_bytes(model, request, backward=False),
        logits=WIDE * request.batch * model.vocabulary,
    )
    return Moment("prefill", parts)


def _training(model: ModelShape, request: PlanRequest) -> Iterator[Moment]:
    rest, tokens, c = _at_rest(model, request), request.tokens, request.compute
    layer, ends, root = _gathered(model, request)
    each, new = layer_bytes(model, request), _new_gradients(model, request)
    merged = _merged_experts(model, request)
    checkpointing = request.sharding.activation_checkpointing
    layers = model.layers * (tokens * (each.checkpoint if checkpointing else each.kept))
    layers += 0 if checkpointing else model.layers * merged
    kept = layers + tokens * ends_kept(model, request)
    again = tokens * (each.kept - c * model.hidden) + merged if checkpointing else 0
    both = min(2, model.layers) * layer + root
    rest = rest.plus(unsharded_gradients=new.root)

    yield Moment(
        "forward pass of the last layer",
        rest.plus(
            gathered_weights=both,
            activations=layers + tokens * each.forward + block_bytes(model, request, backward=False) + merged,
        ),
    )
    tile_weights = 0 if request.mode == "lora" else WIDE * min(VOCAB_CHUNK, model.vocabulary) * model.hidden
    yield Moment(
        "backward pass of the log-probs",
        rest.plus(
            gathered_weights=ends + layer + root,
            unsharded_gradients=new.ends,
            activations=kept + tokens * model.hidden * (WIDE + (c if c < WIDE else 0)) + tile_weights,
            logits=logits_bytes(model, request),
        ),
    )
    yield Moment(
        "backward pass of the last layer's experts",
        rest.plus(
            gathered_weights=both,
            unsharded_gradients=new.experts,
            activations=layers
            + again
            + tokens * each.feedforward_backward
            + block_bytes(model, request, backward=True),
        ),
    )
    done = tokens * each.feedforward + merged
    yield Moment(
        "backward pass of the last layer's attention",
        rest.plus(
            gathered_weights=both,
            unsharded_gradients=new.layer,
            activations=layers + again - done + tokens * each.mixer_backward,
        ),
    )
    yield Moment(
        "backward pass of the embedding",
        rest.plus(
            gathered_weights=ends + root,
            unsharded_gradients=new.ends,
            activations=tokens * c * model.hidden,
        ),
    )
    yield Moment("optimizer step", rest.plus(optimizer=_step_bytes(model, request)))


@dataclass(frozen=True)
class _New:
    """Bytes of gradients that are computed and not yet added to the sums."""

    root: int
    ends: int
    experts: int
    layer: int


def _new_gradients(model: ModelShape, request: PlanRequest) -> _New:
    """On several ranks a unit's gradients are whole, and once more in float32 for the sum over ranks."""
    c, ranks = request.compute, request.gpus.count
    local = model.layer_experts // request.sharding.expert
    if request.mode == "lora":
        # Adapters are small, and the merged experts' gradients are what is multiplied down to them.
        adapters = model.lora_per_rank * request.lora_rank // model.layers * (c + WIDE)
        return _New(0, 0, (local * c if model.lora_fused else 0) + adapters, adapters)
    if not request.gathers:
        # Each is added to its sum as soon as there is one; only the experts' come together.
        return _New(0, model.ends * c, local * c, 0)
    sent = WIDE if ranks > 1 else 0
    whole = model.layer - model.layer_experts + local
    ends = model.ends * (c + sent)
    return _New(ends if model.tied else 0, 0 if model.tied else ends, whole * (c + sent), whole * (c + sent))


def _merged_experts(model: ModelShape, request: PlanRequest) -> int:
    """Adapters of fused experts are added to the whole weights in every forward pass, and autograd keeps the sum."""
    if request.mode != "lora" or not model.lora_fused:
        return 0
    return model.layer_experts // request.sharding.expert * request.compute


def _step_bytes(model: ModelShape, request: PlanRequest) -> int:
    """AdamW's square roots: of all weights at once on GPUs; on CPUs, and with offloading there, of one weight."""
    number, size = _trained(model, request)
    if _offloaded(request):
        return 0
    if request.gpus.cpu:
        largest = model.largest / request.gpus.count
        return round(2 * size * min(number, largest))
    return round(number * size)
