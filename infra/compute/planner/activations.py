"""Bytes per token that a layer keeps for its backward pass, and that it needs while it computes.

The lists follow transformers' GPT-OSS layer, tensor by tensor, with the kernels of this project in it: attention whose
memory is linear in the context (:mod:`infra.compute.attention.sinks`), experts that keep their input and the sort
order only (:mod:`infra.compute.experts`), log-probs that never see the whole vocabulary
(:mod:`infra.compute.linear_logprobs`). A dense layer is one expert that keeps what plain autograd keeps.
"""

from __future__ import annotations

from dataclasses import dataclass

from infra.compute.experts import BLOCK
from infra.compute.linear_logprobs import TOKEN_CHUNK, VOCAB_CHUNK
from infra.compute.planner.models import ModelShape
from infra.compute.planner.request import PlanRequest

WIDE, ID = 4, 8
"""Bytes of a float32, in which norms and sums are computed, and of an index."""


@dataclass(frozen=True)
class LayerBytes:
    """Per token, of one layer."""

    mixer: int
    """Kept by the norm and attention, up to the second residual sum."""
    feedforward: int
    """Kept by the second norm, router and experts."""
    checkpoint: int
    """Kept by a layer that is computed again: its input and its router's choices."""
    forward: int
    """The most that a forward pass needs beside what is kept (all there is without gradients)."""
    mixer_backward: int
    """Gradients and copies alive within the backward pass of attention."""
    feedforward_backward: int
    """The same for the experts, without their blocks."""

    @property
    def kept(self) -> int:
        """By a layer whose backward pass computes nothing again."""
        return self.mixer + self.feedforward


def layer_bytes(model: ModelShape, request: PlanRequest) -> LayerBytes:
    """What one layer of a model needs for each token."""
    c, hidden = request.compute, model.hidden
    q, kv, k = model.heads * model.head_dim, model.kv_heads * model.head_dim, model.top_k
    adapters = request.mode == "lora"
    # Frozen weights need no input for their gradient: a norm keeps its float32 input, and what it returns goes on.
    norm = WIDE * hidden + (0 if adapters else WIDE * hidden) + WIDE
    # q, k, v as rotated; the output in the kernel's layout and in the order of the output projection; log-sum-exps.
    mixer = norm + c * hidden + c * (3 * q + 2 * kv) + WIDE * model.heads
    rank = request.lora_rank * c if adapters else 0
    mixer += model.lora_linears * rank
    routed = k * (2 * ID + c) if model.experts else 0
    feedforward = norm + c * hidden + routed + _mixture(model, request)
    exchange = 2 * c * (q + 2 * kv) if request.sharding.sequence > 1 else 0
    travelling = 2 * c * k * hidden if request.sharding.expert > 1 else 0
    spread = (WIDE if c < WIDE else 0) * hidden
    return LayerBytes(
        mixer=mixer,
        feedforward=feedforward,
        checkpoint=c * hidden + (k * (ID + c) if model.experts else 0),
        forward=max(
            c * (2 * hidden + 3 * q + 2 * kv) + exchange,
            3 * c * hidden + spread + routed + travelling,
            c * hidden + 3 * WIDE * hidden,
        ),
        mixer_backward=c * (hidden + (4 * q + 6 * kv if request.gpus.cpu else 6 * q + 6 * kv)) + exchange,
        feedforward_backward=2 * c * hidden + spread + travelling,
    )


def _mixture(model: ModelShape, request: PlanRequest) -> int:
    """What experts, or a dense layer, keep of a token beside the input that its norm has made."""
    c, k = request.compute, model.top_k
    if not model.sorted_experts:
        gathered = k * model.hidden if model.experts else 0
        return c * (4 * k * model.intermediate + gathered)
    if request.sharding.expert == 1:
        return 0
    # Tokens travel to their experts and back: inputs there, outputs here, the order of both.
    return k * (2 * c * model.hidden + 3 * ID + c)


def block_bytes(model: ModelShape, request: PlanRequest, backward: bool) -> int:
    """Of one expert's block of tokens while it is computed; a dense layer has its hidden units of all tokens."""
    c, hidden, inner = request.compute, model.hidden, model.intermediate
    if not model.sorted_experts:
        return c * request.tokens * model.top_k * inner * (2 if backward else 0)
    local = max(1, model.experts // request.sharding.expert)
    rows = min(BLOCK, -(-request.tokens * model.top_k // local))
    return c * rows * (2 * hidden + 10 * inner if backward else hidden + 4 * inner)


def ends_kept(model: ModelShape, request: PlanRequest) -> int:
    """Bytes per token kept outside the layers: ids, rotations, the final norm, each token's log-sum-exp."""
    c, hidden = request.compute, model.hidden
    normed = 0 if request.mode == "lora" else WIDE * hidden
    return 2 * ID + c * model.head_dim + WIDE * hidden + normed + c * hidden + 2 * WIDE


def logits_bytes(model: ModelShape, request: PlanRequest) -> int:
    """The tiles of logits that log-probs need at once; small batches are one tile that autograd keeps."""
    if request.tokens * model.vocabulary <= TOKEN_CHUNK * VOCAB_CHUNK:
        return 4 * WIDE * request.tokens * model.vocabulary
    tile = min(TOKEN_CHUNK, request.tokens) * min(VOCAB_CHUNK, model.vocabulary)
    return WIDE * tile * (1 if request.mode == "sft" else 2)  # RL takes the entropy as well


def naive_logits_bytes(model: ModelShape, request: PlanRequest) -> int:
    """One float32 copy of all logits of the micro-batch, which plain log-probs make more than once."""
    return WIDE * request.tokens * model.vocabulary


def kv_bytes(model: ModelShape, request: PlanRequest) -> int:
    """Keys and values of the sequences a rank samples; sliding layers hold a window of them."""
    rows = request.rollouts or request.batch
    slots = sum(request.context if window is None else min(window, request.context) for window in model.windows)
    return 2 * request.compute * rows * slots * model.kv_heads * model.head_dim
