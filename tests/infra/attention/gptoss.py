"""GptOss models for parity tests, in float64 throughout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GptOssConfig, GptOssForCausalLM


class ExactNorm(nn.Module):
    """RMSNorm in the dtype of its input: transformers' GptOss norm computes in float32 even in a double model."""

    def __init__(self, weight: nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = weight, epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)


def gptoss(dtype: torch.dtype, seed: int = 0, **overrides: Any) -> GptOssForCausalLM:
    """Four layers, every other one with a window of 6; weights and sinks far enough from zero to matter."""
    settings: dict[str, Any] = {
        "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24, "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 6, "max_position_embeddings": 256, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "pad_token_id": 0,
    }  # fmt: skip
    config = GptOssConfig(**settings | overrides)
    model = GptOssForCausalLM._from_config(config, attn_implementation="eager", experts_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        size = 1.5 if "sinks" in name else 0.2
        mean = 1.0 if "norm" in name else 0.0
        parameter.data = mean + size * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    model.to(dtype)
    if dtype == torch.float64:
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if type(child).__name__ == "GptOssRMSNorm":
                    setattr(module, name, ExactNorm(child.weight, child.variance_epsilon))
    return model.eval()
