"""Peak memory of a small GPT-OSS model in a process of its own: ``python -m … SETTINGS`` (JSON); prints bytes.

The allocator must give freed memory back for this (``tests.memory.FREED_AT_ONCE``).
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import GptOssConfig, GptOssForCausalLM

from infra.compute import experts
from infra.compute.attention.backends import use_sink_attention
from infra.compute.linear_logprobs import linear_logprobs
from infra.compute.sharding.fsdp import transformer_layers
from infra.compute.sharding.recompute import recompute_in_backward
from tests.memory import reset_peak, resident


def small_config(**changes: Any) -> GptOssConfig:
    """Hidden 256, 4 layers, 8 experts, two of them per token."""
    settings: dict[str, Any] = {
        "vocab_size": 16384, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4,
        "num_local_experts": 8, "num_experts_per_tok": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 64, "sliding_window": 128, "max_position_embeddings": 16384,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "pad_token_id": 0,
    }  # fmt: skip
    return GptOssConfig(**settings | changes)


def small_model(checkpointing: bool = False, dtype: str = "float32", **changes: Any) -> Any:
    """With the attention and the experts of this project."""
    experts.register()
    model = GptOssForCausalLM._from_config(small_config(**changes), experts_implementation=experts.EXPERTS)
    model = model.to(getattr(torch, dtype))
    use_sink_attention(model)
    if checkpointing:
        for layer in transformer_layers(model):
            recompute_in_backward(layer)
    return model.train()


def backward(model: Any, context: int, batch: int) -> None:
    """One micro-batch of next-token log-probs."""
    ids = torch.randint(1, model.config.vocab_size, (batch, context + 1))
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    found = linear_logprobs(hidden.flatten(0, 1), model.lm_head.weight, ids[:, 1:].flatten())
    (-found.logprobs.mean()).backward()


def train(model: Any, context: int, batch: int) -> None:
    """A small step, so that the optimizer has its states, and one of a small and a whole micro-batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for lengths in ((64,), (64, context)):
        for length in lengths:
            backward(model, length, batch)
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def prefill(model: Any, context: int, batch: int) -> None:
    """Keys and values of whole sequences, and the logits after them."""
    ids = torch.randint(1, model.config.vocab_size, (batch, context))
    model(input_ids=ids, use_cache=True, logits_to_keep=1)


def main(text: str) -> None:
    """Run it small first, so that what libraries set up is not measured."""
    settings = json.loads(text)
    torch.set_num_threads(1)
    work = prefill if settings["mode"] == "infer" else train
    changes, setup = settings["model"], (settings["checkpointing"], settings["dtype"])
    tiny = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    work(small_model(*setup, **changes | tiny), 300, 1)
    before = resident("VmRSS")
    reset_peak()
    work(small_model(*setup, **changes), settings["context"], settings["batch"])
    print(resident("VmHWM") - before)


if __name__ == "__main__":
    main(sys.argv[1])
