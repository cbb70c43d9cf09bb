"""Parameter counts, division over ranks, knobs, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from transformers import GptOssForCausalLM, Qwen3Config
from typer.testing import CliRunner

from infra.compute.adapters import LoraSettings, add_adapters
from infra.compute.planner.activations import kv_bytes, logits_bytes, naive_logits_bytes
from infra.compute.planner.hardware import GIB, Gpus, parse_gpus
from infra.compute.planner.memory import host_bytes, moments
from infra.compute.planner.models import describe, measure
from infra.compute.planner.plan import make_plan, peak_bytes
from infra.compute.planner.request import PlanRequest
from infra.compute.sharding.config import ShardingConfig
from infra.errors import UsageError
from pipelines.cli import app
from tests.infra.planner._measure import small_config

SMALL = describe("gpt-oss-20b")
LARGE = describe("gpt-oss-120b")


def ask(gpus: str = "8xH100-80GB", context: int = 4096, **more: Any) -> PlanRequest:
    sharding = {name: more.pop(name) for name in tuple(more) if name in ShardingConfig.model_fields}
    return PlanRequest(parse_gpus(gpus), context, sharding=ShardingConfig(**sharding), **more)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


def test_parameters_of_the_published_models():
    assert SMALL.total / 1e9 == pytest.approx(20.91, abs=0.01)
    assert LARGE.total / 1e9 == pytest.approx(116.83, abs=0.01)
    assert LARGE.parameters["experts"] / 1e9 == pytest.approx(114.70, abs=0.01)
    assert LARGE.parameters["embedding"] == LARGE.parameters["head"] == 201088 * 2880
    assert LARGE.parameters["router"] == 36 * 128 * (2880 + 1)
    assert LARGE.parameters["norms"] == (2 * 36 + 1) * 2880
    assert LARGE.parameters["other"] == 0


def test_any_folder_and_tied_weights(tmp_path: Path):
    config = Qwen3Config(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path)
    found = describe(str(tmp_path))
    assert found == replace(describe(str(tmp_path / "config.json")), name=found.name)
    assert found.tied
    assert found.parameters["head"] == 0
    assert found.parameters["mlp"] == 2 * 3 * 32 * 48
    assert peak_bytes(found, ask("2xA100-40GB", 128)) > 0


@pytest.mark.parametrize("text", ["64", "H100-80GB", "0xH100-80GB", "64xH100-0GB", "64xH100", "64*H100-80GB", ""])
def test_gpus_that_cannot_be_read(text: str):
    with pytest.raises(UsageError, match="does not describe GPUs"):
        parse_gpus(text)


def test_gpus():
    assert parse_gpus("8xA100-40GB") == Gpus(8, "A100", 40)
    assert parse_gpus("4xRTX-6000-48GB") == Gpus(4, "RTX-6000", 48)
    assert parse_gpus("1xCPU-24GB").cpu
    assert str(parse_gpus("64xH100-80GB")) == "64xH100-80GB"


def test_each_rank_holds_its_part():
    for gpus in (2, 8, 64):
        step = moments(LARGE, ask(f"{gpus}xH100-80GB", mode="sft"))[-1].parts
        assert step.weights == round(LARGE.total * 4 / gpus)
        assert step.gradients == step.weights
        assert step.optimizer == pytest.approx(3 * step.weights, abs=2)
        assert step.gathered_weights == 0
    reference = moments(LARGE, ask("64xH100-80GB"))[-1].parts.weights
    assert reference == round(2 * LARGE.total * 4 / 64)
    half = moments(LARGE, ask("64xH100-80GB", mode="sft", weights="bfloat16"))[-1].parts
    assert half.weights == round(LARGE.total * 2 / 64)


def test_two_layers_are_gathered_and_experts_by_their_axis():
    forward = moments(LARGE, ask("64xH100-80GB", precision="bfloat16"))[0].parts
    assert forward.gathered_weights == 2 * LARGE.layer * 2
    divided = moments(LARGE, ask("64xH100-80GB", precision="bfloat16", expert=8))[0].parts
    assert divided.gathered_weights == 2 * 2 * (LARGE.layer - LARGE.layer_experts + LARGE.layer_experts // 8)
    assert moments(SMALL, ask("1xH100-80GB"))[0].parts.gathered_weights == 0


def test_offloading_moves_what_is_at_rest_to_the_host():
    plain, there = ask("64xH100-80GB"), ask("64xH100-80GB", offload=True)
    parts = moments(LARGE, plain)[0].parts
    assert host_bytes(LARGE, there) == parts.weights + parts.gradients + parts.optimizer
    assert host_bytes(LARGE, plain) == 0
    assert peak_bytes(LARGE, plain) - peak_bytes(LARGE, there) == host_bytes(LARGE, there)


def test_adapters_are_counted_as_peft_makes_them():
    config = small_config()
    model = GptOssForCausalLM(config)
    adapted = add_adapters(model, LoraSettings(rank=4), 0)
    trained = sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad)
    with torch.device("meta"):
        assert measure(GptOssForCausalLM(config), "small").lora_per_rank * 4 == trained


def test_merged_experts_of_all_layers_are_kept_without_checkpointing():
    kept = peak_bytes(SMALL, ask(mode="lora", precision="bfloat16"))
    again = peak_bytes(SMALL, ask(mode="lora", precision="bfloat16", activation_checkpointing=True))
    assert kept - again > (SMALL.layers - 1) * SMALL.layer_experts * 2


def test_keys_and_values_of_sliding_layers_are_a_window():
    request = ask(context=65536, precision="bfloat16", rollouts=3)
    assert kv_bytes(LARGE, request) == 3 * 2 * 2 * 512 * 18 * (65536 + 128)


def test_logits_are_tiles_and_the_naive_ones_12_gib():
    request = ask(context=4096, batch=4)
    assert naive_logits_bytes(LARGE, request) / GIB == pytest.approx(12.27, abs=0.005)
    assert logits_bytes(LARGE, request) == 2 * 1024 * 8192 * 4


def test_memory_is_linear_in_the_context():
    totals = [peak_bytes(LARGE, ask("64xH100-80GB", context=2**power)) for power in (15, 16, 17)]
    assert totals[2] - totals[1] == pytest.approx(2 * (totals[1] - totals[0]), rel=0.01)


@pytest.mark.parametrize(
    ("more", "what"),
    [({"expert": 3}, "cannot be divided into"), ({"sequence": 16}, "key/value heads"), ({"expert": 64}, "experts of")],
)
def test_what_cannot_be_divided_is_refused(more: dict[str, int], what: str):
    with pytest.raises(UsageError, match=what):
        make_plan(SMALL, ask("64xH100-80GB", **more))


def test_knobs_help_and_the_advice_fits():
    request = ask("64xH100-80GB", context=65536)
    plan = make_plan(LARGE, request)
    assert not plan.fits
    assert plan.advice
    assert all(knob.saves > 0 and knob.total < plan.peak.parts.total for knob in plan.knobs)
    assert [knob.saves for knob in plan.knobs] == sorted((knob.saves for knob in plan.knobs), reverse=True)
    better = make_plan(LARGE, replace(request, sharding=ShardingConfig(
        sequence=8, expert=8, precision="bfloat16", activation_checkpointing=True)))  # fmt: skip
    assert better.fits
    assert better.advice == ()
    assert better.largest_context is not None
    assert peak_bytes(LARGE, replace(better.request, context=better.largest_context)) <= request.gpus.usable
    assert peak_bytes(LARGE, replace(better.request, context=better.largest_context + 1024)) > request.gpus.usable


def test_the_command_as_json():
    done = call("--model", "gpt-oss-120b", "--gpus", "64xH100-80GB", "--context", "65536", "--json")
    assert done.exit_code == 1
    value = json.loads(done.stdout.splitlines()[-1])
    assert value["fits"] is False
    parts = dict(value["per_gpu"])
    assert parts.pop("total") == sum(parts.values()) == value["moments"][value["peak"]]
    assert [row["context"] for row in value["contexts"]] == [4096, 8192, 16384, 32768, 65536, 131072]
    assert value["contexts"][4]["total"] == value["per_gpu"]["total"]
    assert {"name", "saves", "total", "fits"} == set(value["knobs"][0])
    assert value["parameters"]["total"] == LARGE.total


@pytest.mark.parametrize("mode", ["rl", "sft", "lora", "infer"])
def test_the_command_in_words(mode: str):
    done = call("--model", "tiny-moe", "--gpus", "1xCPU-24GB", "--context", "512", "--mode", mode)
    assert done.exit_code == 0
    assert "fits" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("--model", "no/such/model", "--gpus", "1xCPU-24GB"),
        ("--model", "tiny-moe", "--gpus", "many"),
        ("--model", "tiny-moe", "--gpus", "1xCPU-24GB", "--mode", "dream"),
        ("--model", "tiny-moe", "--gpus", "1xCPU-24GB", "--sequence", "2"),
        ("--model", "tiny-moe"),
    ],
)
def test_bad_usage(arguments: tuple[str, ...]):
    assert call(*arguments).exit_code == 2
