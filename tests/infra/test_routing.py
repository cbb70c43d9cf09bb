"""Recorded expert choices come back exactly, and gradients still reach the router."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter

from infra.compute.adapters import LoraSettings, add_adapters
from infra.compute.attention.shared_prefix import make_layout, packed_logits
from infra.compute.routing import MISSING, mismatch, record_routing, replay_routing
from infra.errors import CheckFailed, UsageError
from tests.infra.models import tiny_policy

LAYERS, TOKENS, EXPERTS, TOP_K = 2, 6, 4, 2


def moe(**overrides: Any) -> Any:
    return tiny_policy(layers=LAYERS, experts=EXPERTS, experts_per_token=TOP_K, **overrides).model


def tokens(model: Any, count: int = TOKENS) -> torch.Tensor:
    return torch.randint(0, model.config.vocab_size, (1, count), generator=torch.Generator().manual_seed(3))


def nearly_tied(model: Any) -> Any:
    """Router logits of a token differ by about 1e-6."""
    for module in model.modules():
        if isinstance(module, GptOssTopKRouter):
            module.weight.data.mul_(1e-6 / module.weight.norm(dim=1, keepdim=True))
            module.bias.data.fill_(0.5)
    return model


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return out


def recorded(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), record_routing(model) as recorder:
        logits_of(model, ids)
    return recorder.experts()


def test_rl_27_ties_and_bf16_noise_cannot_change_the_experts_of_a_replay() -> None:
    """RL-27: without replay the choice differs and the share is reported; with replay 12 of 12 sets are the
    recorded ones, seen at the experts themselves, and the router still learns."""
    model = nearly_tied(moe())
    ids = tokens(model)
    rollout = copy.deepcopy(model).bfloat16()
    rolled = recorded(rollout, ids)
    assert list(rolled.shape) == [LAYERS, TOKENS, TOP_K]
    share = mismatch(rolled, recorded(model, ids))
    assert 0 < share <= 1
    seen: list[torch.Tensor] = []
    handles = [
        module.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[1]))
        for module in model.modules()
        if isinstance(module, GptOssExperts)
    ]
    with replay_routing(model, rolled):
        logits_of(model, ids).log_softmax(-1)[..., 0].sum().backward()
    for handle in handles:
        handle.remove()
    pairs = zip(torch.cat(seen).tolist(), rolled.flatten(0, 1).tolist(), strict=True)
    same = sum(set(used) == set(told) for used, told in pairs)
    assert same == LAYERS * TOKENS
    routers = [module for module in model.modules() if isinstance(module, GptOssTopKRouter)]
    assert len(routers) == LAYERS
    assert all(router.weight.grad is not None and router.weight.grad.abs().sum() > 0 for router in routers)


def test_gate_weights_are_the_softmax_of_the_live_logits() -> None:
    model = moe()
    ids = tokens(model)
    forced = torch.tensor([3, 1]).expand(LAYERS, TOKENS, TOP_K)
    live: list[tuple[torch.Tensor, torch.Tensor]] = []

    def spy(module: nn.Module, inputs: Any, output: Any) -> None:
        live.append((output[0], output[1]))

    with replay_routing(model, forced):
        handles = [m.register_forward_hook(spy) for m in model.modules() if isinstance(m, GptOssTopKRouter)]
        logits_of(model, ids)
    for handle in handles:
        handle.remove()
    assert len(live) == LAYERS
    for logits, weights in live:
        expected = logits[:, [3, 1]].exp()
        torch.testing.assert_close(weights, expected / expected.sum(1, keepdim=True))


def test_a_replay_with_unchanged_weights_is_bit_identical_gradients_included() -> None:
    model = moe()
    ids = tokens(model, 40)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        logits_of(model, ids).log_softmax(-1)[..., 5].sum().backward()
        return [weight.grad.clone() for weight in model.parameters()]

    with record_routing(model) as recorder:
        plain = logits_of(model, ids)
    plain_gradients = gradients()
    with replay_routing(model, recorder.experts()):
        again = logits_of(model, ids)
        replayed = gradients()
    assert torch.equal(again, plain)
    assert all(torch.equal(one, other) for one, other in zip(plain_gradients, replayed, strict=True))


def test_replay_holds_while_the_router_moves_and_ends_with_the_context() -> None:
    model = moe()
    ids = tokens(model, 30)
    before = recorded(model, ids)
    for module in model.modules():
        if isinstance(module, GptOssTopKRouter):
            module.weight.data.neg_()
            module.bias.data.neg_()
    with replay_routing(model, before), record_routing(model) as recorder, torch.no_grad():
        logits_of(model, ids)
    assert mismatch(recorder.experts(), before) == 0
    assert mismatch(recorded(model, ids), before) > 0.5
    assert not any(module._forward_hooks for module in model.modules())


def test_hooks_go_also_when_the_forward_fails() -> None:
    model = moe()
    with pytest.raises(RuntimeError, match="stop"), record_routing(model):
        raise RuntimeError("stop")
    with pytest.raises(CheckFailed, match="computes 7 tokens"), replay_routing(model, recorded(model, tokens(model))):
        logits_of(model, tokens(model, 7))
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("hole", [[MISSING, 1], [MISSING, MISSING], [EXPERTS, 0], [2, 2]])
def test_rl_27_a_missing_or_impossible_choice_is_an_error(hole: list[int]) -> None:
    """RL-27: never a silent top-k."""
    model = moe()
    experts = recorded(model, tokens(model))
    experts[1, 4] = torch.tensor(hole)
    where = rf"1 of 12 choices .* \[{hole[0]}, {hole[1]}\] at layer 1, token 4"
    with pytest.raises(CheckFailed, match=where), replay_routing(model, experts):
        logits_of(model, tokens(model))


def test_rl_27_a_missing_layer_or_token_is_an_error() -> None:
    """RL-27: a record that covers a part of the layers or tokens."""
    model = moe()
    ids = tokens(model)
    experts = recorded(model, ids)
    with pytest.raises(CheckFailed, match="needs \\[2, tokens, 2\\]"), replay_routing(model, experts[:1]):
        logits_of(model, ids)
    with pytest.raises(CheckFailed, match="computes 6 tokens, the record has 5"), replay_routing(model, experts[:, :5]):
        logits_of(model, ids)
    with pytest.raises(CheckFailed, match="layers \\[1\\] were not computed"), replay_routing(model, experts):
        model.model.layers[0].mlp(torch.zeros(1, TOKENS, model.config.hidden_size))


def test_several_forwards_are_one_record_and_nothing_is_an_error() -> None:
    model = moe()
    with torch.no_grad(), record_routing(model) as recorder:
        with pytest.raises(CheckFailed, match="recorded \\[0, 0\\] tokens"):
            recorder.experts()
        logits_of(model, tokens(model, 4))
        logits_of(model, tokens(model, 3))
    parts = [recorded(model, tokens(model, 4)), recorded(model, tokens(model, 3))]
    assert torch.equal(recorder.experts(), torch.cat(parts, 1))


def test_mismatch_compares_sets() -> None:
    one = torch.tensor([[[0, 1], [2, 3]], [[1, 0], [3, 2]]])
    other = torch.tensor([[[1, 0], [2, 0]], [[1, 0], [3, 2]]])
    assert mismatch(one, one.flip(-1)) == 0
    assert mismatch(one, other) == 0.25
    with pytest.raises(CheckFailed, match="cannot be compared"):
        mismatch(one, other[:1])
    with pytest.raises(CheckFailed, match="missing"):
        mismatch(one, other.masked_fill(other == 0, MISSING))


def test_a_model_without_routers_is_refused() -> None:
    with pytest.raises(UsageError, match="no GPT-OSS routers"), record_routing(nn.Linear(2, 2)):
        pass


def test_replay_works_on_packed_rows_through_adapters() -> None:
    """The shared-prefix row is recorded and replayed as it is computed, adapters included."""
    model = add_adapters(nearly_tied(moe()), LoraSettings(rank=2), 0)
    layout = make_layout([(9, [4, 6])])
    ids = tokens(model, 19)[0]
    with torch.no_grad(), record_routing(model) as recorder:
        first = packed_logits(model, ids, layout, layout.predictor)
    experts = recorder.experts()
    assert list(experts.shape) == [LAYERS, 19, TOP_K]
    with replay_routing(model, experts):
        again = packed_logits(model, ids, layout, layout.predictor)
    assert torch.equal(first, again)
    other = (experts + 1) % EXPERTS
    with torch.no_grad(), replay_routing(model, other):
        assert not torch.equal(packed_logits(model, ids, layout, layout.predictor), first)
