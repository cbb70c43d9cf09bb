"""In which dtype a sharded model computes and adds gradients up."""

from __future__ import annotations

from functools import reduce

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from infra.compute.sharding.config import ShardingConfig


def mixed_precision(model: nn.Module, config: ShardingConfig) -> MixedPrecisionPolicy:
    """Sharded (master) weights keep their dtype; they are gathered in the dtype of the computation.

    Gradients are added over ranks in float32, or float64 where any of the weights is. ``float32`` means no less
    than float32: a float64 model computes in float64, half-precision weights are widened.
    """
    dtypes = {parameter.dtype for parameter in model.parameters()}
    wide = reduce(torch.promote_types, dtypes, torch.float32)
    compute = torch.bfloat16 if config.precision == "bfloat16" else wide
    if dtypes == {compute}:
        return MixedPrecisionPolicy(reduce_dtype=wide)
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=wide)
