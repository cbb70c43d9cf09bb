"""What is to be planned."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from infra.compute.planner.hardware import Gpus
from infra.compute.planner.models import ModelShape
from infra.compute.sharding.config import ShardingConfig
from infra.errors import UsageError

Mode = Literal["rl", "sft", "lora", "infer"]
Dtype = Literal["float32", "bfloat16"]
BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class PlanRequest:
    """One training step or rollout. ``lora`` is RL with adapters, which needs no copy of the weights as reference.

    Raises:
        UsageError: the ranks, experts, heads or tokens cannot be divided as asked.
    """

    gpus: Gpus
    context: int
    """Tokens of a sequence."""
    batch: int = 1
    """Sequences in the micro-batch of a data rank; with a sequence axis its ranks share them."""
    mode: Mode = "rl"
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    weights: Dtype = "float32"
    """Of the (master) weights, gradients and optimizer states."""
    lora_rank: int = 16
    rollouts: int = 0
    """Sequences that a rank samples at once; 0 = as many as ``batch``."""

    @property
    def tokens(self) -> int:
        """Of a micro-batch, on one rank."""
        return -(-self.batch * self.context // self.sharding.sequence)

    @property
    def compute(self) -> int:
        """Bytes of a number in the computation."""
        return BYTES[self.sharding.precision]

    @property
    def master(self) -> int:
        """Bytes of a number of the weights at rest."""
        return BYTES[self.weights]

    @property
    def gathers(self) -> bool:
        """Whether a layer's weights are made anew to compute with, from shards or in another dtype."""
        return self.gpus.count > 1 or self.compute != self.master

    def check(self, model: ModelShape) -> None:
        """Refuse what ``sharding.shard`` would refuse.

        Raises:
            UsageError: the ranks, experts or heads cannot be divided as asked.
        """
        expert, sequence = self.sharding.expert, self.sharding.sequence
        if self.context < 1 or self.batch < 1 or self.lora_rank < 1 or self.rollouts < 0:
            raise UsageError(
                "context, batch and LoRA rank must be 1 or more, rollouts 0 or more",
                where="senmon plan",
                fix="give positive numbers",
            )
        if self.gpus.count % (expert * sequence):
            raise UsageError(
                f"{self.gpus.count} GPUs cannot be divided into expert {expert} x sequence {sequence}",
                where="--expert, --sequence",
                fix=f"plan for a multiple of {expert * sequence} GPUs",
            )
        if expert > 1 and (not model.sorted_experts or model.experts % expert):
            raise UsageError(
                f"{model.experts} experts of {model.model_type} cannot be divided among {expert} ranks",
                where="--expert",
                fix="give a divisor of the number of experts (GPT-OSS models only)",
            )
        if model.kv_heads % sequence:
            raise UsageError(
                f"{model.kv_heads} key/value heads cannot be divided among {sequence} ranks",
                where="--sequence",
                fix=f"give a divisor of {model.kv_heads}",
            )
