"""Low-rank adapters on attention and fused experts: trained, merged, saved, switched off."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GptOssForCausalLM

from infra.compute.adapters import (
    LoraSettings,
    adapter_state,
    add_adapters,
    base_only,
    load_adapter_state,
    merged_state,
)
from infra.compute.attention.shared_prefix import make_layout, packed_logits
from infra.compute.export import save_model
from infra.errors import CheckFailed, UsageError
from infra.hashing import content_hash
from tests.infra.models import tiny_policy

LAYERS = 2
SETTINGS = LoraSettings(rank=4, alpha=8)


def moe() -> Any:
    return tiny_policy(layers=LAYERS, hidden_size=48).model


def some_ids(model: Any, count: int = 40) -> torch.Tensor:
    return torch.randint(0, model.config.vocab_size, (1, count), generator=torch.Generator().manual_seed(2))


def logprobs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
    return out


def packed(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Log-probs of a shared-prefix row of a prompt and three completions, ``[completion tokens]``."""
    layout = make_layout([(20, [5, 7, 8])])
    logits = packed_logits(model, ids[0], layout, layout.predictor)
    return logits.log_softmax(-1).gather(1, ids[0, layout.target, None])[:, 0]


def train(model: Any, ids: torch.Tensor, steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
    optimizer = optimizer or torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        (-packed(model, ids).mean()).backward()
        optimizer.step()
    return optimizer


def checksum(state: dict[str, torch.Tensor]) -> str:
    return content_hash({name: tensor.double().flatten().tolist() for name, tensor in state.items()})


def randomise(model: Any, size: float) -> None:
    """Give every adapter a ``B`` that is not zero."""
    generator = torch.Generator().manual_seed(6)
    for name, tensor in adapter_state(model).items():
        if ".lora_B." in name:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * size)


def test_default_targets_are_attention_and_fused_experts_and_nothing_else_trains() -> None:
    base = moe()
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    model = add_adapters(base, LoraSettings(), seed=1)
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert len(trained) == LAYERS * 6 * 2
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)
    assert sum("mlp.experts" in name for name in trained) == LAYERS * 2 * 2
    state = merged_state(model)
    assert state.keys() == before.keys(), "names are the base model's"
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.items()), "B = 0 changes nothing"


def test_initialisation_is_seeded_and_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(77)
    before = torch.get_rng_state()
    one, same, other = (adapter_state(add_adapters(moe(), SETTINGS, seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(tensor, same[name]) for name, tensor in one.items())
    assert not any(torch.equal(tensor, other[name]) for name, tensor in one.items() if ".lora_A." in name)


def test_after_adamw_steps_on_packed_rows_every_adapter_has_moved_and_the_base_has_not() -> None:
    base = moe()
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    ids = some_ids(base)
    model = add_adapters(base, SETTINGS, seed=1)
    first = {name: tensor.clone() for name, tensor in adapter_state(model).items()}
    start = float(packed(model, ids).mean().detach())
    train(model, ids, 4)
    assert float(packed(model, ids).mean().detach()) > start + 0.1
    train(model, ids, 1)
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients.values())
    assert not any(torch.equal(tensor, first[name]) for name, tensor in adapter_state(model).items())
    with base_only(model):
        assert torch.equal(logprobs(model, ids), logprobs(restored(before), ids))
    assert model.config._attn_implementation == "eager"


def restored(state: dict[str, torch.Tensor]) -> Any:
    plain = moe()
    plain.load_state_dict(state)
    return plain


@pytest.mark.parametrize("path", [logprobs, packed])
def test_a_plain_model_with_the_merged_weights_says_the_same(path: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    """CK-10 for a whole model in float32, after AdamW steps: to 1e-5."""
    base = moe()
    ids = some_ids(base)
    model = add_adapters(base, SETTINGS, seed=1)
    train(model, ids, 5)
    plain = restored(merged_state(model))
    ours = path(model, ids)
    torch.testing.assert_close(path(plain, ids), ours, rtol=0, atol=1e-5)
    with base_only(model):
        assert (path(model, ids) - ours).abs().max() > 0.1, "the adapters matter"


def test_packed_rows_and_single_sequences_agree_under_adapters() -> None:
    base = moe()
    ids = some_ids(base)
    model = add_adapters(base, SETTINGS, seed=1)
    randomise(model, 0.2)
    alone, at = [], 20
    for length in (5, 7, 8):
        row = torch.cat([ids[0, :20], ids[0, at : at + length]])
        alone.append(logprobs(model, row[None])[0, 19:-1].gather(1, row[20:, None])[:, 0])
        at += length
    torch.testing.assert_close(packed(model, ids), torch.cat(alone), rtol=0, atol=3e-5)


def test_merging_changes_nothing_and_can_be_repeated() -> None:
    base = moe()
    ids = some_ids(base)
    model = add_adapters(base, SETTINGS, seed=1)
    randomise(model, 0.2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    said = logprobs(model, ids)
    once, twice = merged_state(model), merged_state(model)
    assert all(torch.equal(tensor, twice[name]) for name, tensor in once.items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(logprobs(model, ids), said)
    assert not any(tensor.requires_grad for tensor in once.values())


class One(nn.Module):
    """A single linear layer without bias."""

    def __init__(self, size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out


def test_ck_10_the_scale_is_alpha_over_rank_and_applied_once() -> None:
    """CK-10: W = 1, r = 2, alpha = 4, BA = 5: merged is 11, once and twice."""
    base = One(1)
    base.layer.weight.data.fill_(1.0)
    model = add_adapters(base, LoraSettings(rank=2, alpha=4, targets=("layer",)), seed=0)
    state = adapter_state(model)
    state["layer.lora_A.default.weight"].copy_(torch.tensor([[1.0], [2.0]]))
    state["layer.lora_B.default.weight"].copy_(torch.tensor([[1.0, 2.0]]))
    for _ in range(2):
        assert merged_state(model)["layer.weight"].tolist() == [[11.0]]
    assert model(torch.ones(1, 1)).item() == 11.0


def test_ck_10_an_adapter_that_peft_has_merged_in_place_is_not_merged_again() -> None:
    """CK-10: the scale is never applied twice."""
    model = add_adapters(One(2), LoraSettings(rank=2, targets=("layer",)), seed=0)
    model.merge_adapter()
    with pytest.raises(CheckFailed, match="already merged"):
        merged_state(model)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float32, 1e-5)])
def test_ck_10_a_small_delta_on_a_half_precision_layer(dtype: torch.dtype, tolerance: float) -> None:
    """CK-10: 64 x 64 with a delta of 1e-4, merged in float32 and cast once."""
    torch.manual_seed(0)
    base = One(64, dtype)
    base.layer.weight.data.copy_(torch.randn(64, 64) / 8)
    weight = base.layer.weight.detach().clone()
    model = add_adapters(base, LoraSettings(rank=2, alpha=4, targets=("layer",)), seed=0)
    state = adapter_state(model)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}, "adapters are wide"
    a, b = torch.randn(2, 64) * 1e-2, torch.randn(64, 2) * 5e-3
    state["layer.lora_A.default.weight"].copy_(a)
    state["layer.lora_B.default.weight"].copy_(b)
    merged = merged_state(model)["layer.weight"]
    assert merged.dtype == dtype
    assert torch.equal(merged, (weight.float() + 2 * (b @ a)).to(dtype))
    x = torch.randn(8, 64).to(dtype) / 4
    torch.testing.assert_close(x @ merged.T, model(x), rtol=0, atol=tolerance)


def test_ck_10_the_served_model_is_the_evaluated_one(tmp_path: Path) -> None:
    """CK-10: same checksum in memory, in the saved policy, and read back."""
    base = moe()
    model = add_adapters(base, SETTINGS, seed=1)
    randomise(model, 0.2)
    evaluated = restored(merged_state(model))
    save_model(evaluated, tmp_path)
    served = GptOssForCausalLM.from_pretrained(tmp_path)
    assert checksum(served.state_dict()) == checksum(evaluated.state_dict()) == checksum(merged_state(model))


def test_ck_11_a_delta_on_one_fused_expert_arrives_there_and_only_there() -> None:
    """CK-11: 4 experts, fused [4, 8, 8], delta on expert 2."""
    base = tiny_policy(layers=1, hidden_size=8, expert_size=8, experts=4).model
    weight = base.model.layers[0].mlp.experts.down_proj.detach().clone()
    assert list(weight.shape) == [4, 8, 8]
    model = add_adapters(base, LoraSettings(rank=2, alpha=4, targets=("mlp.experts.down_proj",)), seed=0)
    a, b = torch.randn(2, 8), torch.randn(8, 2)
    state = adapter_state(model)
    for name, tensor in state.items():  # A [experts * rank, in], B [out, rank * experts]
        tensor.zero_()
        if ".lora_A." in name:
            tensor[4:6] = a
        else:
            tensor[:, 2::4] = b
    change = merged_state(model)["model.layers.0.mlp.experts.down_proj"] - weight
    expected = 2 * (b @ a).T  # transformers keeps these weights as [experts, in, out]
    torch.testing.assert_close(change[2], expected, rtol=0, atol=1e-6)
    assert change[2].norm() > 1
    assert change[[0, 1, 3]].abs().max() == 0
    plain = tiny_policy(layers=1, hidden_size=8, expert_size=8, experts=4).model
    plain.load_state_dict(merged_state(model))
    ids = some_ids(plain, 30)
    torch.testing.assert_close(logprobs(plain, ids), logprobs(model, ids), rtol=0, atol=1e-5)


def test_ck_11_experts_stored_the_other_way_round() -> None:
    """CK-11 for weights ``[experts, out, in]``, as other models keep them."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(3, 5, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.einsum("ti,eoi->teo", x, self.up)

    torch.manual_seed(0)
    base = nn.ModuleDict({"experts": Experts()})
    model = add_adapters(base, LoraSettings(rank=2, targets=("experts.up",)), seed=0)
    randomise(model, 1.0)
    x = torch.randn(6, 4)
    merged = torch.einsum("ti,eoi->teo", x, merged_state(model)["experts.up"])
    torch.testing.assert_close(merged, model.get_base_model()["experts"](x))


def test_ck_11_a_weight_that_is_not_found_by_its_name_is_an_error() -> None:
    """CK-11: the number of merged weights must be that of the adapters."""
    base = moe()
    model = add_adapters(base, SETTINGS, seed=1)

    def rename(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in [name for name in state if name.endswith("gate_up_proj")]:
            state[name.replace("gate_up_proj", "gate_up")] = state.pop(name)

    base.register_state_dict_post_hook(rename)
    with pytest.raises(CheckFailed, match=r"10 of 12 adapters were merged.*layers\.0\.mlp\.experts\.gate_up_proj"):
        merged_state(model)


def test_an_adapter_of_another_kind_is_an_error() -> None:
    model = get_peft_model(moe(), LoraConfig(target_modules=["embed_tokens"]))
    with pytest.raises(CheckFailed, match="a kind that cannot be merged"):
        merged_state(model)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("q_proj", "w_pack"), "ends in 'w_pack'"),
        (("mlp.experts.up_proj",), "ends in 'mlp.experts.up_proj'"),
        (("roj",), "ends in 'roj'"),
        (("embed_tokens",), "ends in 'embed_tokens'"),
    ],
)
def test_a_target_that_matches_nothing_is_an_error(targets: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        add_adapters(moe(), LoraSettings(targets=targets), seed=0)
    assert "q_proj" in error.value.fix


def test_adapters_on_adapters_are_refused() -> None:
    base = moe()
    add_adapters(base, SETTINGS, seed=0)
    with pytest.raises(UsageError):
        add_adapters(base, SETTINGS, seed=0)


def test_a_count_that_is_not_the_matches_is_an_error() -> None:
    """peft matches by the end of a name, so ``layer`` means ``inner.layer`` as well."""
    base = nn.ModuleDict({"layer": nn.Linear(2, 2), "inner": nn.ModuleDict({"layer": nn.Embedding(2, 2)})})
    with pytest.raises(UsageError, match="2 adapters were made for 1 linear layers and 0 fused"):
        add_adapters(base, LoraSettings(targets=("layer",)), seed=0)


def test_a_tied_weight_is_refused() -> None:
    model = moe()
    model.lm_head.weight = model.model.embed_tokens.weight
    with pytest.raises(UsageError, match="lm_head shares its weight"):
        add_adapters(model, LoraSettings(targets=("lm_head",)), seed=0)


def test_dropout_is_for_linear_layers_only() -> None:
    with pytest.raises(UsageError, match="cannot have dropout"):
        add_adapters(moe(), LoraSettings(dropout=0.1), seed=0)
    model = add_adapters(moe(), LoraSettings(dropout=0.5, targets=("q_proj",)), seed=0)
    randomise(model, 1.0)
    ids = some_ids(model)
    assert torch.equal(logprobs(model, ids), logprobs(model, ids)), "the base is in eval mode, so are its adapters"
    model.train()
    assert not torch.equal(logprobs(model, ids), logprobs(model, ids))


def test_base_only_is_the_base_bit_for_bit_and_ends_also_after_an_error() -> None:
    base = moe()
    ids = some_ids(base)
    reference = logprobs(copy.deepcopy(base), ids)
    model = add_adapters(base, SETTINGS, seed=1)
    randomise(model, 0.2)
    adapted = logprobs(model, ids)
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]

    def interrupted() -> None:
        with base_only(model):
            assert torch.equal(logprobs(model, ids), reference)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        interrupted()
    assert torch.equal(logprobs(model, ids), adapted)
    assert not torch.equal(adapted, reference)
    assert [name for name, weight in model.named_parameters() if weight.requires_grad] == trained


def test_a_reference_pass_between_forward_and_backward_does_no_harm() -> None:
    def gradients(interrupted: bool) -> list[torch.Tensor]:
        base = moe()
        ids = some_ids(base)
        model = add_adapters(base, SETTINGS, seed=1)
        randomise(model, 0.2)
        loss = -packed(model, ids).mean()
        if interrupted:
            with base_only(model), torch.no_grad():
                packed(model, ids)
        loss.backward()
        return [weight.grad for weight in model.parameters() if weight.grad is not None]

    for one, other in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(one, other)


def test_adapters_and_optimizer_resume_bit_for_bit() -> None:
    def fresh() -> Any:
        return add_adapters(moe(), SETTINGS, seed=1)

    model, ids = fresh(), some_ids(moe())
    optimizer = train(model, ids, 2)
    file = io.BytesIO()
    torch.save({"adapters": adapter_state(model), "optimizer": optimizer.state_dict()}, file)
    train(model, ids, 2, optimizer)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = add_adapters(moe(), SETTINGS, seed=99)
    load_adapter_state(resumed, saved["adapters"])
    again = torch.optim.AdamW([p for p in resumed.parameters() if p.requires_grad], lr=1e-2)
    again.load_state_dict(saved["optimizer"])
    train(resumed, ids, 2, again)
    for name, tensor in adapter_state(model).items():
        assert torch.equal(tensor, adapter_state(resumed)[name])


def test_adapters_of_another_shape_or_name_are_refused_untouched() -> None:
    model = add_adapters(moe(), SETTINGS, seed=1)
    before = {name: tensor.clone() for name, tensor in adapter_state(model).items()}
    wider = adapter_state(add_adapters(moe(), LoraSettings(rank=8), seed=1))
    fewer = dict(list(before.items())[1:])
    for state, count in ((wider, 24), (fewer, 1), ({**before, "other.lora_A.default.weight": torch.ones(1)}, 1)):
        with pytest.raises(CheckFailed, match=f"{count} saved adapter weights do not fit"):
            load_adapter_state(model, state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in adapter_state(model).items())
