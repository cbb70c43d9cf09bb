"""One side of one workload in a process of its own: ``python -m … WORKLOAD SIDE RUNS`` prints a line of JSON.

Peak memory is what a run needs beyond the inputs, weights and masks that were there before it. Two sides in one process
would use each other's freed memory and measure nothing.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.memory import reset_peak, resident

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
HIDDEN, EXPERTS, SLOTS = 1024, 32, 4
LAYER_HIDDEN = 512
VOCABULARY, STATE = 201_088, 64
WARM_UP = 128
"""Tokens of a run before the measured ones."""

Step = Callable[[], "tuple[Tensor, ...]"]


def draw(*shape: int, scale: float = 1.0, learned: bool = True) -> Tensor:
    """Normal random numbers, float32."""
    return (torch.randn(shape) * scale).requires_grad_(learned)


def causal(length: int) -> Tensor:
    """The additive mask ``[1, 1, length, length]`` of eager attention."""
    return torch.full((1, 1, length, length), torch.finfo(torch.float32).min).triu_(1)


def attention(side: str, tokens: int) -> Step:
    """Causal attention with sinks, forward and backward."""
    q = draw(1, HEADS, tokens, HEAD_DIM)
    k, v = draw(1, KV_HEADS, tokens, HEAD_DIM), draw(1, KV_HEADS, tokens, HEAD_DIM)
    sinks, grad = draw(HEADS), draw(1, HEADS, tokens, HEAD_DIM, learned=False)
    if side == "ours":
        from infra.compute.attention.sinks import sink_attention

        return lambda: torch.autograd.grad(sink_attention(q, k, v, sinks), (q, k, v, sinks), grad)
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    module: Any = SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, sinks=sinks, training=False)
    mask = causal(tokens)

    def eager() -> tuple[Tensor, ...]:
        out = eager_attention_forward(module, q, k, v, mask, HEAD_DIM**-0.5)[0]
        return torch.autograd.grad(out, (q, k, v, sinks), grad.transpose(1, 2))

    return eager


def layer(side: str, tokens: int) -> Step:
    """A decoder layer of GptOss, attention over the whole context and experts, forward and backward."""
    from transformers import GptOssConfig, GptOssModel

    from infra.compute import experts
    from infra.compute.attention import sinks

    sinks.register()
    experts.register()
    config = GptOssConfig(
        vocab_size=64, hidden_size=LAYER_HIDDEN, intermediate_size=LAYER_HIDDEN, num_hidden_layers=1,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, num_local_experts=EXPERTS,
        num_experts_per_tok=SLOTS, layer_types=["full_attention"], max_position_embeddings=tokens, pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    names = (sinks.ATTENTION, experts.EXPERTS) if side == "ours" else ("eager", "eager")
    model = GptOssModel._from_config(config, attn_implementation=names[0], experts_implementation=names[1])
    x, grad = draw(1, tokens, LAYER_HIDDEN), draw(1, tokens, LAYER_HIDDEN, learned=False)
    positions = torch.arange(tokens)[None]
    turns = model.rotary_emb(x, positions)
    mask = None if side == "ours" else causal(tokens)
    leaves = [x, *model.layers[0].parameters()]

    def step() -> tuple[Tensor, ...]:
        out = model.layers[0](x, attention_mask=mask, position_ids=positions, position_embeddings=turns)
        return torch.autograd.grad(out, leaves, grad)

    return step


def moe(side: str, tokens: int, train: bool) -> Step:
    """An expert layer of GptOss, 4 of 32 experts a token."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    from infra.compute import experts

    experts.register()
    config = GptOssConfig(hidden_size=HIDDEN, intermediate_size=HIDDEN, num_local_experts=EXPERTS)
    config._experts_implementation = experts.EXPERTS if side == "ours" else side
    made = GptOssExperts(config)
    for parameter in made.parameters():
        parameter.data.normal_(std=0.03)
    hidden, grad = draw(tokens, HIDDEN), draw(tokens, HIDDEN, learned=False)
    best = torch.randn(tokens, EXPERTS).topk(SLOTS, -1)
    ids, routing = best.indices, best.values.softmax(-1).requires_grad_()
    if train:
        return lambda: torch.autograd.grad(made(hidden, ids, routing), [hidden, routing, *made.parameters()], grad)

    def step() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (made(hidden, ids, routing),)

    return step


def logprobs(side: str, tokens: int, train: bool) -> Step:
    """Log-probs of given tokens over a vocabulary of 201,088."""
    from infra.compute.linear_logprobs import linear_logprobs

    hidden, weight = draw(tokens, STATE), draw(VOCABULARY, STATE, scale=STATE**-0.5)
    ids, grad = torch.randint(VOCABULARY, (tokens,)), draw(tokens, learned=False)

    def run() -> Tensor:
        if side == "ours":
            return linear_logprobs(hidden, weight, ids).logprobs
        return torch.log_softmax(hidden @ weight.T, 1).gather(1, ids[:, None])[:, 0]

    if train:
        return lambda: torch.autograd.grad(run(), (hidden, weight), grad)

    def step() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (run(),)

    return step


def build(workload: str, side: str, tokens: int) -> Step:
    """The work of one side; names are those of ``memory_per_token``."""
    torch.manual_seed(0)
    kind, *rest = workload.split("/")
    if kind == "attention":
        return attention(side, tokens)
    if kind == "layer":
        return layer(side, tokens)
    return (moe if kind == "experts" else logprobs)(side, tokens, rest[0] == "train")


def main(workload: str, side: str, runs: str) -> None:
    """Print the largest peak in bytes, the seconds of every run, and norms of the results, which all sides share."""
    torch.set_num_threads(1)
    build(workload, side, WARM_UP)()  # loads libraries, which would count as memory of the first run
    step = build(workload, side, int(workload.rsplit("/", 1)[1].removesuffix("k")) * 1024)
    before = resident("VmRSS")
    peaks: list[int] = []
    seconds: list[float] = []
    for _ in range(int(runs)):
        results: tuple[Tensor, ...] = ()
        reset_peak()
        began = time.perf_counter()
        results = step()
        seconds.append(time.perf_counter() - began)
        peaks.append(resident("VmHWM") - before)
    norms = [float(torch.linalg.vector_norm(x.detach(), dtype=torch.float64)) for x in results]
    print(json.dumps({"bytes": max(peaks), "seconds": seconds, "norms": norms}))


if __name__ == "__main__":
    main(*sys.argv[1:])
