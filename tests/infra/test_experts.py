"""Sorted experts against transformers' eager ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from infra.compute import experts
from infra.compute.config import ModelConfig
from infra.compute.experts import EXPERTS, ExpertWeights, freeze_router, sorted_experts
from infra.compute.policy import tiny_moe
from infra.errors import UsageError
from tests.infra.models import chat_model_folder, tiny_policy

HIDDEN, INTERMEDIATE = 12, 10


def layer(count: int, dtype: torch.dtype, scale: float = 0.5, implementation: str = "eager") -> GptOssExperts:
    settings = GptOssConfig(hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_local_experts=count)
    settings._experts_implementation = implementation
    made = GptOssExperts(settings).to(dtype)
    generator = torch.Generator().manual_seed(count)
    for parameter in made.parameters():
        parameter.data = (torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale).to(dtype)
    return made


def weights_of(made: GptOssExperts) -> ExpertWeights:
    parts = (made.gate_up_proj, made.gate_up_proj_bias, made.down_proj, made.down_proj_bias)
    return ExpertWeights(*parts, made.alpha, made.limit)


def draw(tokens: int, count: int, slots: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, expert ids and routing weights; the last expert is never chosen."""
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)
    logits = torch.randn(tokens, count - 1, generator=generator, dtype=torch.float64)
    best = logits.topk(slots, -1)
    return hidden.to(dtype), best.indices, best.values.softmax(-1).to(dtype)


def results(
    made: GptOssExperts, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], block: int | None
) -> dict[str, torch.Tensor]:
    """Output and all gradients of eager experts (no ``block``) or ours."""
    hidden, ids, routing = inputs
    hidden, routing = hidden.clone().requires_grad_(), routing.clone().requires_grad_()
    made.zero_grad()
    run = made if block is None else lambda *given: sorted_experts(*given, weights_of(made), block)
    out = run(hidden, ids, routing)
    out.backward(torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out))
    named = {"out": out, "d_hidden": hidden.grad, "d_routing": routing.grad}
    named |= {name: parameter.grad for name, parameter in made.named_parameters()}
    return {name: value.detach().clone() for name, value in named.items() if value is not None}


def differences(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> dict[str, float]:
    assert ours.keys() == theirs.keys()
    return {name: float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in ours}


@pytest.mark.parametrize("scale", [0.3, 3.0], ids=["inside the limit", "clamped"])
@pytest.mark.parametrize("block", [1, 7, 1024])
@pytest.mark.parametrize(("count", "slots"), [(8, 2), (5, 4), (3, 1)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_output_and_every_gradient_equal_eager(
    count: int, slots: int, block: int, scale: float, dtype: torch.dtype, tolerance: float
) -> None:
    made, inputs = layer(count, dtype, scale), draw(61, count, slots, dtype)
    found = results(made, inputs, block)
    wrong = {k: v for k, v in differences(found, results(made, inputs, None)).items() if not v <= tolerance}
    assert wrong == {}
    assert len(found) == 7
    for name, _ in made.named_parameters():
        assert not found[name][-1].any(), "an expert without tokens gets a gradient of zeros"
        assert found[name][0].any()


def test_gradcheck() -> None:
    made, (hidden, ids, routing) = layer(4, torch.float64), draw(6, 4, 2, torch.float64)
    parts = [p.detach().clone().requires_grad_() for p in made.parameters()]
    assert torch.autograd.gradcheck(
        lambda x, r, *p: sorted_experts(x, ids, r, ExpertWeights(*p, made.alpha, made.limit), 2),
        (hidden.requires_grad_(), routing.requires_grad_(), *parts),
    )


def test_gradients_flow_at_the_limit_itself_as_in_eager() -> None:
    made = layer(2, torch.float64)
    with torch.no_grad():
        made.gate_up_proj.zero_()
        made.gate_up_proj_bias.fill_(made.limit)
    inputs = (
        torch.ones(3, HIDDEN, dtype=torch.float64),
        torch.zeros(3, 1, dtype=torch.long),
        torch.ones(3, 1).double(),
    )
    found, expected = results(made, inputs, 1024), results(made, inputs, None)
    assert expected["gate_up_proj_bias"].all(1).tolist() == [True, False]
    torch.testing.assert_close(found["gate_up_proj_bias"], expected["gate_up_proj_bias"], rtol=1e-12, atol=0)


def test_half_precision_adds_experts_up_in_float32() -> None:
    """Twelve experts that add the same 0.003 to 1: in bfloat16 each addition would be rounded away."""
    made = layer(13, torch.bfloat16)
    with torch.no_grad():
        made.down_proj.zero_()
        made.down_proj_bias.fill_(0.003)
        made.down_proj_bias[0] = 1.0
    inputs = (torch.zeros(2, HIDDEN).bfloat16(), torch.arange(13).repeat(2, 1), torch.ones(2, 13).bfloat16())
    with torch.no_grad():
        ours, eager = sorted_experts(*inputs, weights_of(made)), made(*inputs)
    assert ours.dtype == torch.bfloat16
    assert eager.unique().tolist() == [1.0]
    assert ours.unique().tolist() == pytest.approx([1.036], abs=0.004)


def test_slots_of_other_ranks_add_nothing_and_unknown_experts_are_refused() -> None:
    made, (hidden, ids, routing) = layer(8, torch.float64), draw(30, 8, 2, torch.float64)
    elsewhere = ids >= 3
    here = results(made, (hidden, ids, routing.masked_fill(elsewhere, 0.0)), 7)
    marked = results(made, (hidden, ids.masked_fill(elsewhere, 8), routing), 7)
    assert not marked["d_routing"][elsewhere].any()
    torch.testing.assert_close(marked["d_routing"][~elsewhere], here["d_routing"][~elsewhere], rtol=1e-12, atol=1e-12)
    for name in ("out", "d_hidden", "gate_up_proj", "down_proj_bias"):
        torch.testing.assert_close(marked[name], here[name], rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="expert id 9 in a layer of 8"):
        sorted_experts(hidden, torch.full_like(ids, 9), routing, weights_of(made))


def test_the_backward_pass_uses_the_experts_that_the_forward_pass_chose() -> None:
    """ME-05: recomputed activations belong to the saved expert ids, whatever happens to the router's tensors later."""
    made, (hidden, ids, routing) = layer(8, torch.float64), draw(61, 8, 2, torch.float64)
    expected = results(made, (hidden, ids, routing), None)
    hidden = hidden.clone().requires_grad_()
    out = sorted_experts(hidden, ids, routing, weights_of(made), 7)
    ids.copy_((ids + 1) % 8)
    out.backward(torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out))
    torch.testing.assert_close(hidden.grad, expected["d_hidden"], rtol=1e-12, atol=1e-12)


def test_frozen_experts_get_no_gradient_and_the_inputs_the_same() -> None:
    made, inputs = layer(8, torch.float64), draw(61, 8, 2, torch.float64)
    expected = results(made, inputs, 7)
    made.requires_grad_(False)
    found = results(made, inputs, 7)
    assert found.keys() == {"out", "d_hidden", "d_routing"}
    assert all(torch.equal(found[name], expected[name]) for name in found)


class _Memory(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple) else (out,):
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.numel())
        return out


def test_memory_is_the_inputs_and_one_block() -> None:
    """Saved: inputs, parameters and one number per assignment; made: nothing larger than inputs and parameters."""
    tokens, count, slots = 300, 8, 4
    made, (hidden, ids, routing) = layer(count, torch.float64), draw(tokens, count, slots, torch.float64)
    hidden.requires_grad_()
    saved: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        saved[x.data_ptr()] = x.numel()
        return x

    with _Memory() as memory, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        torch.autograd.backward(sorted_experts(hidden, ids, routing, weights_of(made), 16).sum())
    given = {x.data_ptr() for x in (hidden, routing, *made.parameters())}
    assert [size for at, size in saved.items() if at not in given] == [tokens * slots]
    assert memory.elements == tokens * HIDDEN
    with _Memory() as eager:
        made(hidden, ids, routing).sum().backward()
    assert eager.elements > tokens * HIDDEN, "the check can see more"


def test_transformers_runs_a_whole_model_on_it_and_saves_it_as_before(tmp_path: Path) -> None:
    experts.register()
    model = tiny_policy(experts=8, experts_per_token=3).model.double()
    ids = torch.randint(0, model.config.vocab_size, (2, 40), generator=torch.Generator().manual_seed(0))

    def run() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model.zero_grad()
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        return out.logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}

    logits, gradients = run()
    model.set_experts_implementation(EXPERTS)
    calls: list[int] = []
    handle = model.model.layers[0].mlp.experts.register_forward_hook(lambda *_: calls.append(1))
    ours, our_gradients = run()
    handle.remove()
    assert model.model.layers[0].mlp.experts.config._experts_implementation == EXPERTS
    # The model's norms round to float32 even in a float64 model.
    torch.testing.assert_close(ours, logits, rtol=0, atol=1e-6)
    for name, gradient in our_gradients.items():
        torch.testing.assert_close(gradient, gradients[name], rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    model.save_pretrained(tmp_path)
    assert EXPERTS not in (tmp_path / "config.json").read_text()


def test_other_models_are_refused() -> None:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    experts.register()
    settings = Qwen3MoeConfig(hidden_size=8, moe_intermediate_size=8, num_experts=4)
    settings._experts_implementation = EXPERTS
    with pytest.raises(UsageError, match="not that of Qwen3MoeExperts"):
        Qwen3MoeExperts(settings)(torch.zeros(2, 8), torch.zeros(2, 2, dtype=torch.long), torch.ones(2, 2))


def test_a_frozen_router_stays_and_everything_below_it_learns(tmp_path: Path) -> None:
    model = tiny_moe(ModelConfig(preset="tiny-moe", layers=2), 300, 0, 1, seed=0)
    frozen = freeze_router(model)
    assert sorted(frozen) == [f"model.layers.{i}.mlp.router.{part}" for i in (0, 1) for part in ("bias", "weight")]
    ids = torch.arange(20)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert without == set(frozen)
    assert model.model.embed_tokens.weight.grad.any()
    from transformers import AutoModelForCausalLM

    with pytest.raises(UsageError, match="no router"):
        freeze_router(AutoModelForCausalLM.from_pretrained(chat_model_folder(tmp_path)))
