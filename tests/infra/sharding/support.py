"""Real gloo ranks, a small GPT-OSS in float64, and what one rank computes with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm

from infra.compute import experts

TOLERANCE = 1e-10
EXACT = torch.float64


def run_ranks(main: Callable[..., Any], ranks: int, folder: Path, *arguments: Any) -> list[Any]:
    """Run ``main(*arguments)`` in real processes joined by gloo; returns what each returned, rank by rank.

    ``main`` must be importable (a function of the test module) and return tensors and plain values.
    """
    mp.spawn(_entry, (main, ranks, str(folder), arguments), ranks)  # type: ignore[attr-defined,no-untyped-call]
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(ranks)]


def _entry(rank: int, main: Callable[..., Any], ranks: int, folder: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    result = main(*arguments)
    torch.save(result, Path(folder) / f"rank-{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


class ExactNorm(nn.Module):
    """transformers' RMSNorm computes in float32 even in a float64 model; this one does not."""

    def __init__(self, norm: GptOssRMSNorm) -> None:
        super().__init__()
        self.weight, self.epsilon = norm.weight, norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon))
        return out


def use_exact_norms(model: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, GptOssRMSNorm):
                setattr(parent, name, ExactNorm(child))


def tiny_config(tied: bool = False, **overrides: Any) -> GptOssConfig:
    settings: dict[str, Any] = {
        "vocab_size": 67,
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 10,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    return GptOssConfig(**settings | overrides)


def tiny_model(seed: int = 0, tied: bool = False, dtype: torch.dtype = EXACT, **overrides: Any) -> Any:
    """A GPT-OSS whose weights and sinks are far from zero; the same on every rank.

    Sizes are odd on purpose: few of them can be divided by 2 or 4. In float64 the norms are exact too.
    """
    experts.register()
    model = GptOssForCausalLM._from_config(
        tiny_config(tied, **overrides), attn_implementation="eager", experts_implementation=experts.EXPERTS
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else noise * (1.0 if "sinks" in name else 0.2))
    model = model.to(dtype).eval()
    if dtype == EXACT:
        use_exact_norms(model)
    return model


@dataclass(frozen=True)
class Rows:
    """Sequences ``ids [rows, length]`` and the weight of each predicted token ``[rows, length - 1]`` (0: prompt)."""

    ids: Tensor
    weights: Tensor

    def take(self, rows: Sequence[int]) -> Rows:
        return Rows(self.ids[list(rows)], self.weights[list(rows)])

    def share(self, rank: int, ranks: int) -> Rows:
        """Every ``ranks``-th row."""
        return self.take(range(rank, len(self.ids), ranks))

    @property
    def count(self) -> int:
        """Tokens that count."""
        return int((self.weights != 0).sum())


def some_rows(rows: int = 8, length: int = 12, vocab: int = 67, seed: int = 3) -> Rows:
    """Random sequences with prompts and ends of various lengths."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, vocab, (rows, length), generator=generator)
    weights = torch.randn(rows, length - 1, generator=generator, dtype=EXACT)
    position = torch.arange(length - 1)
    for row in range(rows):
        weights[row] *= (position >= row % 3 + 1) & (position < length - 1 - row % 4)
    return Rows(ids, weights)


def loss_of(model: Any, rows: Rows, count: int) -> Tensor:
    """Weighted log-probs, summed over these rows and divided by the tokens of *all* rows, as the objectives do."""
    logits = model(input_ids=rows.ids, use_cache=False).logits[:, :-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    chosen = logits.log_softmax(-1).gather(-1, rows.ids[:, 1:, None])[..., 0]
    loss: Tensor = -(rows.weights.to(chosen.dtype) * chosen).sum() / count
    return loss


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, sharded or not, as a copy; every rank must call it."""
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients by name; every rank must call it."""
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Whole weights by name; every rank must call it."""
    return {name: whole(p) for name, p in model.named_parameters()}


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)


def train(model: Any, rows: Rows, count: int, steps: int) -> list[Tensor]:
    """AdamW steps on these rows; returns this rank's part of the loss of each step."""
    optimizer, losses = adamw(model), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, rows, count)
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.detach())
    return losses


def summed(loss: Tensor) -> Tensor:
    """The parts of all ranks together."""
    total = loss.detach().clone()
    distributed.all_reduce(total)
    return total


def assert_same(ours: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    """Names and values are equal, and the expected ones are not all zero."""
    assert ours.keys() == expected.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=tolerance, msg=partial("{}: {}".format, name))
    assert sum(float(tensor.abs().sum()) for tensor in expected.values()) > 1e-3
