"""The embedded engine: exact, rows independent of their neighbours, cache kept across tool calls."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.compute.logprobs import align, pad_sequences, token_logprobs
from infra.compute.policy import load_policy
from infra.inference.embedded.decoder import Decoder
from infra.inference.embedded.engine import EmbeddedEngine
from infra.inference.embedded.generic import TransformersDecoder
from infra.inference.embedded.gptoss import GptOssDecoder
from infra.inference.embedded.sampling import sample
from infra.inference.engine import SamplingParams, StopReason
from tests.infra.models import chat_model_folder, tiny_policy


def reference_logits(model: Any, rows: list[list[int]]) -> torch.Tensor:
    with torch.no_grad():
        return torch.stack([model(torch.tensor([row]), use_cache=False).logits[0, -1] for row in rows])


@pytest.mark.parametrize("decoder", [GptOssDecoder, TransformersDecoder])
def test_decoders_equal_transformers_while_rows_come_go_and_idle(decoder: Callable[[Any], Decoder]) -> None:
    model = tiny_policy().model
    under_test = decoder(model)
    rng = random.Random(1)
    vocabulary = model.config.vocab_size

    def draw(length: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(length)]

    prompts = [draw(40), draw(3), draw(17)]
    rows = [list(prompts[0]), list(prompts[0]), list(prompts[1]), *(list(prompts[2]) for _ in range(3))]
    torch.testing.assert_close(under_test.add(prompts, [2, 1, 3]), reference_logits(model, rows), rtol=0, atol=1e-5)
    for step in range(50):
        active = torch.tensor([rng.random() < 0.8 for _ in rows])
        tokens = torch.tensor([rng.randrange(vocabulary) for _ in rows])
        for row, fed, token in zip(rows, active.tolist(), tokens.tolist(), strict=True):
            if fed:
                row.append(token)
        logits = under_test.feed(tokens, active)
        if step % 7 == 0 and active.any():
            torch.testing.assert_close(logits[active], reference_logits(model, rows)[active], rtol=0, atol=1e-5)
        if step == 20:
            under_test.remove(1)
            rows[1] = rows[-1]
            rows.pop()
        if step == 30:
            late = [draw(5), draw(70)]
            rows += [list(late[0]), list(late[1]), list(late[1])]
            torch.testing.assert_close(
                under_test.add(late, [1, 2]), reference_logits(model, rows[-3:]), rtol=0, atol=1e-5
            )
    assert under_test.size == len(rows)


def test_chunks_of_different_lengths_go_to_some_rows_only() -> None:
    model = tiny_policy().model
    under_test = GptOssDecoder(model)
    rng = random.Random(2)
    rows = [[rng.randrange(model.config.vocab_size) for _ in range(length)] for length in (9, 30, 4)]
    under_test.add(rows, [1, 1, 1])
    for chosen in ([0, 2], [0, 1, 2], [1]):
        chunks = [[rng.randrange(model.config.vocab_size) for _ in range(rng.randint(1, 40))] for _ in chosen]
        logits = under_test.feed_chunk(chosen, chunks)
        for row, chunk in zip(chosen, chunks, strict=True):
            rows[row] += chunk
        torch.testing.assert_close(logits, reference_logits(model, [rows[i] for i in chosen]), rtol=0, atol=1e-5)
    tokens = torch.tensor([1, 2, 3])
    expected = reference_logits(model, [[*row, token] for row, token in zip(rows, tokens.tolist(), strict=True)])
    torch.testing.assert_close(under_test.feed(tokens, torch.ones(3, dtype=torch.bool)), expected, rtol=0, atol=1e-5)


def test_long_prompts_are_prefilled_packed_with_the_same_result() -> None:
    model = tiny_policy().model
    rng = random.Random(3)
    rows = [[rng.randrange(model.config.vocab_size) for _ in range(length)] for length in (200, 31, 129)]
    under_test = GptOssDecoder(model)
    torch.testing.assert_close(under_test.add(rows, [1, 1, 1]), reference_logits(model, rows), rtol=0, atol=1e-5)
    tokens = torch.tensor([1, 2, 3])
    expected = reference_logits(model, [[*row, token] for row, token in zip(rows, tokens.tolist(), strict=True)])
    torch.testing.assert_close(under_test.feed(tokens, torch.ones(3, dtype=torch.bool)), expected, rtol=0, atol=1e-5)


def generate(engine: EmbeddedEngine, prompt: list[int], params: list[SamplingParams]) -> dict[int, list[int]]:
    handles = engine.submit(prompt, params)
    out: dict[int, list[int]] = {handle: [] for handle in handles}
    while events := engine.step():
        for event in events:
            out.setdefault(event.sequence, []).append(event.token)
    return {handle: out[handle] for handle in handles}


def test_a_sequence_depends_on_its_own_seed_only() -> None:
    policy = tiny_policy()
    params = [SamplingParams(max_tokens=12, seed=seed) for seed in (5, 6, 7)]
    alone = [next(iter(generate(EmbeddedEngine(policy.model), [1, 2, 3], [p]).values())) for p in params]
    together = list(generate(EmbeddedEngine(policy.model), [1, 2, 3], params).values())
    assert together == alone
    assert len({tuple(tokens) for tokens in alone}) == 3


@pytest.mark.parametrize("length", [1, 9])
def test_sampled_logprobs_equal_the_trainers_across_a_tool_call(length: int) -> None:
    policy = tiny_policy()
    engine = EmbeddedEngine(policy.model)
    prompt = [2, 30, 40, 50]
    params = SamplingParams(max_tokens=16, temperature=0.7, stop_ids=frozenset(range(100)), seed=3)
    (handle,) = engine.submit(prompt, [params])
    ids: list[int] = []
    logprobs: list[float] = []
    mask: list[int] = []
    for _ in range(3):
        while True:
            (event,) = engine.step() or [None]
            if event is None:
                continue
            ids.append(event.token)
            logprobs.append(event.logprob)
            mask.append(1)
            if event.finished:
                break
        result = [60, 61, 62] * length
        engine.extend(handle, result)
        ids += result
        logprobs += [0.0] * len(result)
        mask += [0] * len(result)
    batch = pad_sequences([prompt], [ids], [mask], 0)
    with torch.no_grad():
        trained = token_logprobs(policy.model, batch, temperature=0.7) * batch.mask
    torch.testing.assert_close(trained, align([prompt], [logprobs], batch.ids.shape[1]), rtol=0, atol=1e-5)


def test_stop_and_length_end_a_turn_and_release_forgets_it() -> None:
    policy = tiny_policy()
    engine = EmbeddedEngine(policy.model)
    everything = frozenset(range(policy.model.config.vocab_size))
    stopped, cut = engine.submit([1], [SamplingParams(9, stop_ids=everything), SamplingParams(1)])
    reasons = {event.sequence: event.finished for event in engine.step()}
    assert reasons == {stopped: StopReason.STOP, cut: StopReason.LENGTH}
    assert engine.step() == []
    engine.release(stopped)
    engine.release(cut)
    engine.release(12345)
    with pytest.raises(KeyError):
        engine.extend(stopped, [1])


def test_release_of_a_running_and_of_a_waiting_sequence_leaves_the_others_alone() -> None:
    policy = tiny_policy()
    params = [SamplingParams(max_tokens=10, seed=seed) for seed in range(3)]
    expected = list(generate(EmbeddedEngine(policy.model), [4, 5], params).values())
    engine = EmbeddedEngine(policy.model)
    handles = engine.submit([4, 5], params)
    (waiting,) = engine.submit([6], [SamplingParams(5)])
    engine.release(waiting)
    out: dict[int, list[int]] = {handle: [] for handle in handles}
    for step in range(10):
        for event in engine.step():
            out[event.sequence].append(event.token)
        if step == 2:
            engine.release(handles[0])
    assert [out[handles[1]], out[handles[2]]] == expected[1:]
    assert out[handles[0]] == expected[0][:3]


def test_weights_can_change_only_between_sequences() -> None:
    policy = tiny_policy()
    engine = EmbeddedEngine(policy.model)
    (handle,) = engine.submit([1, 2], [SamplingParams(4)])
    engine.step()
    with pytest.raises(RuntimeError, match="release them first"):
        engine.sync()
    engine.release(handle)
    before = engine.weight_version
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.5)
    engine.sync()
    assert engine.weight_version == before + 1
    greedy = SamplingParams(6, temperature=0.0)
    assert (
        generate(engine, [1, 2], [greedy]).popitem()[1]
        == (generate(EmbeddedEngine(policy.model), [1, 2], [greedy]).popitem()[1])
    )


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="empty prompt"):
        EmbeddedEngine(tiny_policy().model).submit([], [SamplingParams(1)])


def test_the_context_bounds_prompts_turns_and_tool_results() -> None:
    engine = EmbeddedEngine(tiny_policy(max_positions=16).model)
    with pytest.raises(ValueError, match="context is 16"):
        engine.submit([1] * 16, [SamplingParams(4)])
    (handle,) = engine.submit([1] * 10, [SamplingParams(100)])
    events = [event for _ in range(6) for event in engine.step()]
    assert [event.finished for event in events] == [None] * 5 + [StopReason.LENGTH]
    with pytest.raises(ValueError, match="do not fit"):
        engine.extend(handle, [1])
    engine.submit([1], [SamplingParams(1)])
    assert engine.step(), "others go on"


def test_chat_model_runs_through_the_same_engine(tmp_path: Path) -> None:
    policy = load_policy(chat_model_folder(tmp_path / "model"))
    engine = EmbeddedEngine(policy.model)
    prompt = list(range(20))
    tokens = generate(engine, prompt, [SamplingParams(8, temperature=0.0)]).popitem()[1]
    row = list(prompt)
    for token in tokens:
        assert int(reference_logits(policy.model, [row])[0].argmax()) == token
        row.append(token)
    assert policy.renderer.stop_ids == {policy.tokenizer.eos_token_id, policy.tokenizer.pad_token_id}


def test_truncation_keeps_what_it_says() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).log_softmax(-1)
    probabilities = logits.exp()[0]

    def allowed(**settings: float) -> set[int]:
        params = SamplingParams(max_tokens=1, **settings)  # type: ignore[arg-type]
        return {int(sample(logits, [params], [u / 1000])[0]) for u in range(1000)}

    assert allowed(top_k=2) == {0, 1}
    assert allowed(top_p=float(probabilities[0]) - 1e-3) == {0}
    assert allowed(top_p=float(probabilities[:2].sum()) - 1e-3) == {0, 1}
    assert allowed(min_p=0.3) == {0, 1}
    assert allowed() == {0, 1, 2, 3}
    token, logprob = sample(logits, [SamplingParams(max_tokens=1, top_k=2)], [0.99])
    assert int(token) == 1
    assert float(logprob) == pytest.approx(float((probabilities[1] / probabilities[:2].sum()).log()), abs=1e-6)


def test_frequencies_follow_the_distribution() -> None:
    logits = torch.tensor([[0.5, -0.3, 1.2]])
    rng = random.Random(0)
    count = 4000
    tokens, _ = sample(logits.expand(count, -1), [SamplingParams(1)] * count, [rng.random() for _ in range(count)])
    share = torch.bincount(tokens, minlength=3) / count
    torch.testing.assert_close(share, logits.softmax(-1)[0], rtol=0, atol=0.03)
