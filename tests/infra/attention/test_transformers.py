"""The attention inside transformers' GptOss: padded and packed batches, against eager on each sequence alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import AttentionMaskInterface, GptOssForCausalLM

from infra.compute.attention import sinks
from infra.compute.attention.backends import require_sinks, use_sink_attention
from infra.compute.attention.kernels import Span
from infra.compute.attention.sinks import attend, read_segments
from infra.errors import UsageError
from tests.infra.attention.gptoss import gptoss

LENGTHS = (29, 1, 7, 18)


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, 61, (length,), generator=generator) for length in LENGTHS]


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Something that depends on every position."""
    weights = torch.linspace(0.5, 1.5, len(ids), dtype=logits.dtype)
    return (logits.log_softmax(-1)[torch.arange(len(ids)), ids] * weights).sum()


def alone(model: GptOssForCausalLM) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Logits of each sequence by itself, and the gradients of their common loss."""
    logits = [model(input_ids=ids[None], use_cache=False).logits[0] for ids in sequences()]
    sum(loss_of(each, ids) for each, ids in zip(logits, sequences(), strict=True)).backward()
    return logits, {name: p.grad for name, p in model.named_parameters()}


def padded(model: GptOssForCausalLM, left: Sequence[bool]) -> list[Tensor]:
    """Logits of all sequences in one batch, each padded on its side."""
    ids, mask = torch.zeros(4, 29, dtype=torch.long), torch.zeros(4, 29, dtype=torch.long)
    at = [slice(29 - n, 29) if on_left else slice(0, n) for n, on_left in zip(LENGTHS, left, strict=True)]
    for row, (where, sequence) in enumerate(zip(at, sequences(), strict=True)):
        ids[row, where], mask[row, where] = sequence, 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    return [logits[row, where] for row, where in enumerate(at)]


def packed(model: GptOssForCausalLM) -> list[Tensor]:
    """Logits of all sequences one after the other in one row."""
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    logits = model(input_ids=torch.cat(sequences())[None], position_ids=positions, use_cache=False).logits[0]
    return list(logits.split(LENGTHS))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-4)])
@pytest.mark.parametrize("how", ["alone", "right", "left", "both", "packed"])
def test_logits_and_all_gradients(how: str, dtype: torch.dtype, tolerance: float) -> None:
    expected, gradients = alone(gptoss(torch.float64))
    model = gptoss(dtype)
    use_sink_attention(model)
    if how == "alone":
        logits, found = alone(model)
    else:
        sides = {"right": [False] * 4, "left": [True] * 4, "both": [False, True, False, True]}
        logits = packed(model) if how == "packed" else padded(model, sides[how])
        sum(loss_of(each, ids) for each, ids in zip(logits, sequences(), strict=True)).backward()
        found = {name: p.grad for name, p in model.named_parameters()}
    assert max(float((a.double() - b).detach().abs().max()) for a, b in zip(logits, expected, strict=True)) <= tolerance
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert float((found[name].double() - gradient).abs().max()) <= tolerance * max(1, float(gradient.abs().max()))
    assert all(float(gradients[name].abs().max()) > 1e-3 for name in gradients if "sinks" in name)


def test_left_padding_with_positions_that_count_the_padding() -> None:
    """What transformers does when no positions are given."""
    model = gptoss(torch.float64)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    ids = torch.arange(8)[None] + 5
    expected = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, 3:]
    use_sink_attention(model)
    found = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, 3:]
    assert float((found - expected).detach().abs().max()) <= 1e-10


def test_segments_of_a_mask() -> None:
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 0, 1, 1], [0, 0, 0, 0, 0]])
    positions = torch.tensor([[0, 0, 1, 0, 1], [0, 1, 2, 3, 4], [0, 1, 0, 0, 1], [0, 1, 2, 3, 4]])
    assert read_segments(mask, positions, 4, 5).spans == (
        Span(0, 1, 3), Span(0, 3, 5), Span(1, 0, 3), Span(2, 0, 2), Span(2, 3, 5),
    )  # fmt: skip
    assert read_segments(None, positions[:1], 2, 5).spans == (
        Span(0, 0, 1), Span(0, 1, 3), Span(0, 3, 5), Span(1, 0, 1), Span(1, 1, 3), Span(1, 3, 5),
    )  # fmt: skip
    assert read_segments(None, torch.arange(5)[None], 2, 5).whole_rows


@pytest.mark.parametrize(
    ("mask", "told"),
    [
        (torch.tensor([[1, 1, 0, 1]]), "a hole before position 3 of row 0"),
        (torch.zeros(1, 1, 4, 4), "cannot be read"),
        (torch.ones(1, 4), "cannot be read"),
        (torch.ones(2, 4, dtype=torch.long), "cannot be read"),
    ],
)
def test_a_mask_that_would_be_misread_is_refused(mask: Tensor, told: str) -> None:
    model = gptoss(torch.float32)
    use_sink_attention(model)
    with pytest.raises(UsageError, match=told):
        attend(model.model.layers[0].self_attn, *(torch.zeros(1, 8, 4, 8),) * 3, mask, s_aux=torch.zeros(8),
               position_ids=torch.arange(4)[None])  # fmt: skip


def test_a_prepared_mask_is_refused_by_the_model() -> None:
    model = gptoss(torch.float32)
    use_sink_attention(model)
    with pytest.raises(UsageError, match="cannot be read"):
        model(input_ids=torch.ones(1, 4, dtype=torch.long), attention_mask=torch.zeros(1, 1, 4, 4), use_cache=False)


def test_sinks_that_do_not_arrive_and_dropout_are_refused() -> None:
    layer = gptoss(torch.float32).model.layers[0].self_attn
    x = torch.zeros(1, 8, 4, 8)
    with pytest.raises(UsageError, match="sinks of layer 0 did not reach"):
        attend(layer, x, x, x, None)
    with pytest.raises(UsageError, match=r"dropout 0\.1"):
        attend(layer, x, x, x, None, dropout=0.1, s_aux=torch.zeros(8))


def test_decoding_with_a_cache_is_refused_in_words() -> None:
    model = gptoss(torch.float32)
    use_sink_attention(model)
    with pytest.raises(UsageError, match="no key/value cache"):
        model.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=3)


def test_back_ends_without_sinks_or_masks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gptoss(torch.float32)
    require_sinks(model)
    model.config._attn_implementation = "sdpa"
    with pytest.raises(UsageError, match="'sdpa' ignores the model's attention sinks"):
        require_sinks(model)
    use_sink_attention(model)
    masks = {**AttentionMaskInterface._global_mapping}
    monkeypatch.setattr(AttentionMaskInterface, "_global_mapping", masks)
    del masks[sinks.ATTENTION]
    with pytest.raises(UsageError, match="padding would be lost"):
        require_sinks(model)
