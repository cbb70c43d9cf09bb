"""PPO's critic: one linear layer on the policy's own hidden states."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Critic(nn.Module):
    """Values ``[…]`` of hidden states ``[…, hidden]``, in float32; starts at 0 everywhere.

    Its loss trains the backbone too: one network has two heads (arXiv 1707.06347, sec. 5).
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.head = nn.Linear(hidden, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, states: Tensor) -> Tensor:
        """Values of ``states``."""
        value: Tensor = self.head(states.to(torch.promote_types(states.dtype, torch.float32)))
        return value.squeeze(-1)
