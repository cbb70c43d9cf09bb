"""Low-rank adapters (LoRA) on attention projections and on fused expert weights, through ``peft``.

The base weights stay frozen, so that the reference policy is the same model with its adapters off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pydantic import Field

from infra.errors import CheckFailed, UsageError
from infra.records import Config

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor, nn

ADAPTER = "default"
"""peft's name for a model's only adapter."""


class LoraSettings(Config):
    """``weight + alpha / rank * B A`` (Hu et al. 2021, https://arxiv.org/abs/2106.09685)."""

    rank: int = Field(default=16, ge=1)
    alpha: int = Field(default=32, ge=1)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """On the adapter's input; fused experts do not take any."""
    targets: tuple[str, ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        min_length=1,
    )
    """Ends of the names of linear layers, or of 3-D weights ``[experts, in, out]``."""


def add_adapters(model: nn.Module, settings: LoraSettings, seed: int) -> PeftModel:
    """Wrap a model (in place) in adapters that change nothing yet (``B = 0``); only they are trainable.

    Adapters of a half-precision model are float32; the mode (train or eval) is the model's.

    Args:
        seed: of ``A``; the global random state is left as it was.

    Raises:
        UsageError: a target matches nothing or a tied weight, dropout is asked of fused experts, or peft made
            another number of adapters than there are matches.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    linear, fused = _matches(model, settings.targets)
    if fused and settings.dropout:
        raise UsageError(
            f"fused expert weights such as {fused[0]} cannot have dropout on their input",
            where="lora.dropout",
            fix="set dropout to 0, or leave the experts out of lora.targets",
        )
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=linear,
        target_parameters=fused,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        adapted = get_peft_model(model, config, adapter_name=ADAPTER).train(model.training)
    made = len(_adapters(adapted))
    if made != len(linear) + len(fused):
        raise UsageError(
            f"{made} adapters were made for {len(linear)} linear layers and {len(fused)} fused weights",
            where="lora.targets",
            fix="name the targets by longer ends of their names, so that each means one kind of layer",
        )
    return adapted


def merged_state(model: PeftModel) -> dict[str, Tensor]:
    """The weights under the base model's own names, adapters merged in; the model itself is not changed.

    ``base + alpha / rank * B A`` is computed in float32 (float64 for a float64 base) and cast to the base's dtype.
    Weights without an adapter are the model's own tensors, not copies. A sharded model is gathered tensor by tensor:
    every rank must call it, rank 0 gets whole CPU tensors and the others an empty dict.

    Raises:
        CheckFailed: an adapter cannot be merged or was left over, or is already merged into the base.
    """
    import torch
    from torch import distributed
    from torch.distributed.tensor import DTensor

    adapters = _adapters(model)
    by_weight = {_weight_name(name, layer): layer for name, layer in adapters.items()}
    merged, names = 0, list[str]()
    state: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, tensor in model.get_base_model().state_dict().items():
            if _is_adapter(name):
                continue
            plain, own = plain_name(name), isinstance(tensor, DTensor)
            tensor, layer = _whole(tensor), by_weight.get(plain)
            if layer is not None:
                wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
                tensor = (wide + _delta(plain, layer)).to(tensor.dtype)
                merged += 1
            names.append(plain)
            if not own:
                state[plain] = tensor
            elif distributed.get_rank() == 0:
                state[plain] = tensor.cpu()
    odd = sorted(name for name in names if "base_layer" in name or "lora_" in name)
    if merged != len(adapters) or odd:
        missing = sorted(by_weight.keys() - set(names))
        raise CheckFailed(
            f"{merged} of {len(adapters)} adapters were merged; weights not found: {missing}; odd names: {odd}",
            where="merging of adapters",
            fix="make the adapters with add_adapters, on a model whose state dict has its parameters' names",
        )
    return state


def adapter_state(model: PeftModel) -> dict[str, Tensor]:
    """The adapters' weights by name, for a checkpoint; the tensors are the live ones, not copies."""
    return {name: tensor for name, tensor in model.get_base_model().state_dict().items() if _is_adapter(name)}


def load_adapter_state(model: PeftModel, state: Mapping[str, Tensor]) -> None:
    """Put back what :func:`adapter_state` gave.

    Raises:
        CheckFailed: names or shapes are not those of the model's adapters; nothing is changed.
    """
    own = adapter_state(model)
    ours = {name: tuple(tensor.shape) for name, tensor in own.items()}
    theirs = {name: tuple(tensor.shape) for name, tensor in state.items()}
    wrong = sorted({name for name, _ in ours.items() ^ theirs.items()})
    if wrong:
        raise CheckFailed(
            f"{len(wrong)} saved adapter weights do not fit the model's, the first is {wrong[0]}",
            where="adapters of the checkpoint",
            fix="resume with the rank and the targets that the checkpoint was made with",
        )
    for name, tensor in own.items():
        tensor.copy_(state[name])


@contextmanager
def base_only(model: PeftModel) -> Iterator[None]:
    """Adapters off: the model computes what its base does, bit for bit."""
    with model.disable_adapter():
        yield


def plain_name(name: str) -> str:
    """A weight's name without the wrappers' own part; several of one module's weights nest several wrappers."""
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


def _matches(model: nn.Module, targets: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Names of linear layers and of 3-D weights that the targets mean, each sorted."""
    from torch import nn

    modules = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    weights = dict(model.named_parameters(remove_duplicate=False))
    fused = {name for name, weight in weights.items() if weight.dim() == 3}
    found: set[str] = set()
    for target in targets:
        hits = {name for name in modules | fused if f".{name}".endswith(f".{target}")}
        if not hits:
            raise UsageError(
                f"no linear layer and no 3-D weight ends in {target!r}",
                where="lora.targets",
                fix=f"name some of {sorted({name.rpartition('.')[2] for name in modules | fused})}",
            )
        found |= hits
    owners = [id(weight) for weight in weights.values()]
    tied = [n for n in sorted(found & modules) if owners.count(id(weights[f"{n}.weight"])) > 1]
    if tied:
        raise UsageError(
            f"{tied[0]} shares its weight with another layer, which a merged adapter would change too",
            where="lora.targets",
            fix=f"leave {tied[0]} out of the targets",
        )
    return sorted(found & modules), sorted(found & fused)


def _adapters(model: PeftModel) -> dict[str, Any]:
    """All adapter layers of the base model by name."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.get_base_model().named_modules() if isinstance(module, LoraLayer)}


def _whole(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def _weight_name(name: str, layer: Any) -> str:
    from peft.tuners.lora.layer import ParamWrapper

    return f"{plain_name(name)}.{layer.parameter_name if isinstance(layer, ParamWrapper) else 'weight'}"


def _delta(name: str, layer: Any) -> Tensor:
    """``alpha / rank * B A`` in the weight's layout.

    For E experts peft stores ``A`` as ``[E·rank, in]`` (experts outside) and ``B`` as ``[out, rank·E]`` (experts
    inside).

    Raises:
        CheckFailed: the kind of layer is not known, or it is merged already.
    """
    import torch
    from peft.tuners.lora.layer import Linear, ParamWrapper

    fused, known = isinstance(layer, ParamWrapper), isinstance(layer, Linear | ParamWrapper)
    if layer.merged or not known:
        raise CheckFailed(
            f"the adapter of {name} is {'already merged' if layer.merged else 'of a kind that cannot be merged'}",
            where="merging of adapters",
            fix="make the adapters with add_adapters and leave merging to merged_state",
        )
    a, b = _whole(layer.lora_A[ADAPTER].weight), _whole(layer.lora_B[ADAPTER].weight)
    wide = torch.promote_types(a.dtype, torch.float32)
    a, b, scale = a.to(wide), b.to(wide), float(layer.scaling[ADAPTER])
    if not fused:
        return scale * (b @ a)
    # transformers marks expert modules whose weights are [experts, in, out]; the others are [experts, out, in].
    layout = "eio" if getattr(layer.get_base_layer(), "is_transposed", False) else "eoi"
    experts: int = layer.num_experts
    a, b = a.view(experts, -1, a.shape[1]), b.view(b.shape[0], -1, experts)
    return scale * torch.einsum(f"ore,eri->{layout}", b, a)
