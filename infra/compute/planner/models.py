"""What the planner knows of a model: built on the meta device, where weights have shapes and no memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.compute.adapters import LoraSettings
from infra.compute.config import ModelConfig
from infra.compute.policy import tiny_moe_config
from infra.errors import UsageError

GPT_OSS = {
    "gpt-oss-20b": {"num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": {"num_hidden_layers": 36, "num_local_experts": 128},
}
"""The two published sizes; all else is what they share, the defaults of transformers' ``GptOssConfig``."""
PRESETS = (*GPT_OSS, "tiny-moe")
CATEGORIES = ("embedding", "head", "attention", "router", "experts", "mlp", "norms", "other")


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model; counts are numbers of parameters, and those of one layer are of the largest one."""

    name: str
    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    intermediate: int
    experts: int
    """0 = a dense model."""
    top_k: int
    windows: tuple[int | None, ...]
    """Sliding window of each layer; None = full attention."""
    max_positions: int
    tied: bool
    parameters: Mapping[str, int]
    """Per category of :data:`CATEGORIES`."""
    layer: int
    """All parameters of a layer."""
    layer_experts: int
    """Those of its experts."""
    largest: int
    """The largest single weight."""
    largest_experts: int
    """The largest single weight of experts."""
    engine_copies: int
    """What the embedded engine lays out anew: fused projections and the experts' first product."""
    lora_per_rank: int
    """Parameters of all adapters for each unit of rank."""
    lora_linears: int
    """Linear layers with an adapter in a layer."""
    lora_fused: bool
    """Experts have adapters, so that a layer's merged expert weights are made in every forward pass."""

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(self.parameters.values())

    @property
    def ends(self) -> int:
        """Parameters of the embedding, as many as the head's."""
        return self.parameters["embedding"]

    @property
    def sorted_experts(self) -> bool:
        """Experts are computed one block of tokens at a time (:mod:`infra.compute.experts`)."""
        return self.model_type == "gpt_oss"


def describe(model: str) -> ModelShape:
    """Sizes of a preset, or of the transformers model whose folder or ``config.json`` is given; no weights are read.

    Raises:
        UsageError: there is no such model, its config is broken, or it is no causal language model with known layers.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = _config(model)
    try:
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(config)
        return measure(built, Path(model).name if model not in PRESETS else model)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UsageError(
            f"model {model!r} cannot be planned: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            where="--model",
            fix="give a causal language model with num_hidden_layers, num_attention_heads and hidden_size",
        ) from error


def _config(model: str) -> Any:
    from transformers import AutoConfig, GptOssConfig

    if model in GPT_OSS:
        return GptOssConfig(**GPT_OSS[model])
    if model == "tiny-moe":
        tiny = ModelConfig(preset="tiny-moe")
        return tiny_moe_config(tiny, tiny.vocab_size, pad_id=0, end_id=1)
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UsageError(
            f"no model {model!r}",
            where="--model",
            fix=f"give {', '.join(PRESETS)}, or a folder with config.json",
        )
    try:
        config = AutoConfig.from_pretrained(str(file), trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{file} cannot be read: {str(error).splitlines()[0]}",
            where=str(file),
            fix="give the config.json of a transformers model",
        ) from error
    # Published GPT-OSS weights are quantised; here they are planned in the dtype that is trained.
    if "quantization_config" in config.to_dict():
        del config.quantization_config
    return config


def measure(model: Any, name: str) -> ModelShape:
    """Sizes of a transformers model, on any device."""
    from infra.compute.sharding.fsdp import transformer_layers

    config = model.config.get_text_config()
    facts = config.to_dict()
    heads = config.num_attention_heads
    named = dict(model.named_parameters())
    input_weight, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    tied = head is not None and head.weight is input_weight
    parameters = Counter(dict.fromkeys(CATEGORIES, 0))
    for weight_name, weight in named.items():
        parameters[category(weight_name)] += weight.numel()
    layers = transformer_layers(model)
    sizes = [
        (sum(w.numel() for w in layer.parameters()), _experts(layer.named_parameters()), layer) for layer in layers
    ]
    layer_size, layer_experts, layer = max(sizes, key=lambda entry: entry[:2])
    experts = int(facts.get("num_local_experts") or facts.get("num_experts") or 0)
    linears, fused, per_rank = _adapters(layer, layers)
    return ModelShape(
        name=name,
        model_type=config.model_type,
        layers=len(layers),
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=int(facts.get("num_key_value_heads") or heads),
        head_dim=int(facts.get("head_dim") or config.hidden_size // heads),
        vocabulary=config.vocab_size,
        intermediate=int((experts and facts.get("moe_intermediate_size")) or config.intermediate_size),
        experts=experts,
        top_k=int(facts.get("num_experts_per_tok") or 1) if experts else 1,
        windows=_windows(facts, len(layers)),
        max_positions=int(facts.get("max_position_embeddings") or 0),
        tied=tied,
        parameters=dict(parameters),
        layer=layer_size,
        layer_experts=layer_experts,
        largest=max(weight.numel() for weight in named.values()),
        largest_experts=max(
            (weight.numel() for name, weight in named.items() if category(name) == "experts"), default=0
        ),
        engine_copies=sum(weight.numel() for name, weight in named.items() if _fused_again(name, config.model_type)),
        lora_per_rank=per_rank,
        lora_linears=linears,
        lora_fused=fused,
    )


def category(name: str) -> str:
    """Which of :data:`CATEGORIES` a parameter belongs to, by its name."""
    if "embed_tokens" in name or name.endswith("wte.weight"):
        return "embedding"
    if "lm_head" in name:
        return "head"
    if ".experts." in name or ".shared_expert." in name:
        return "experts"
    if ".router." in name or ".mlp.gate." in name or ".shared_expert_gate." in name:
        return "router"
    if "norm" in name and "attn." not in name:
        return "norms"
    if "attn" in name or "attention." in name:
        return "attention"
    if ".mlp." in name:
        return "mlp"
    return "other"


def _experts(named: Any) -> int:
    return sum(weight.numel() for name, weight in named if category(f".{name}") == "experts")


def _windows(facts: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    kinds = facts.get("layer_types") or ["full_attention"] * layers
    window = facts.get("sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _fused_again(name: str, model_type: str) -> bool:
    ends = ("q_proj", "k_proj", "v_proj", "gate_up_proj", "gate_up_proj_bias")
    return model_type == "gpt_oss" and any(f".{end}." in f"{name}." for end in ends)


def _adapters(layer: Any, layers: Sequence[Any]) -> tuple[int, bool, int]:
    """Adapted linear layers of a layer, whether experts are adapted, and parameters of all layers per unit of rank."""
    targets = LoraSettings().targets
    linears, fused, total = 0, False, 0
    for each in layers:
        for name, weight in each.named_parameters():
            module = f".{name.removesuffix('.weight')}"
            if not any(module.endswith(f".{target}") for target in targets) or weight.ndim < 2:
                continue
            copies = weight.shape[0] if weight.ndim == 3 else 1
            total += copies * (weight.shape[-1] + weight.shape[-2])
            if each is layer:
                linears += weight.ndim == 2
                fused = fused or weight.ndim == 3
    return linears, fused, total
