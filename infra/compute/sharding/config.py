"""How training is spread over ranks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from infra.records import Config


class ShardingConfig(Config):
    """Ranks are a grid data x expert x sequence; the data axis takes what the other two leave.

    Weights that all tokens use are sharded over every rank, experts over the expert axis first.
    """

    strategy: Literal["fsdp2", "deepspeed"] = "fsdp2"
    expert: int = Field(default=1, ge=1)
    """Ranks among which the experts of a layer are divided; a divisor of their number."""
    sequence: int = Field(default=1, ge=1)
    """Ranks among which every sequence is divided (Ulysses); a divisor of the key/value heads."""
    zero_stage: Literal[2, 3] = 3
    """DeepSpeed only: 2 shards gradients and optimizer, 3 the weights too."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the computation; sharded weights, gradient sums and optimizer stay in the dtype of the model."""
    activation_checkpointing: bool = False
    """Keep one hidden state per layer and compute the rest again in the backward pass."""
    offload: bool = False
    """Keep sharded weights and optimizer in host memory while a layer does not compute."""
