"""Policies on disk: a safetensors directory with tokenizer and manifest; built, loaded and saved here."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from infra.compute.config import ModelConfig
from infra.compute.tokenizer import CONTROL_TOKENS, train_tokenizer
from infra.errors import CheckFailed, UsageError
from infra.hashing import tree_hash
from infra.inference.engine import Engine
from infra.inference.renderers.base import Renderer
from infra.records import Record

if TYPE_CHECKING:
    from transformers import GptOssConfig, PreTrainedModel, PreTrainedTokenizerBase

MANIFEST = "senmon.json"


class PolicyManifest(Record):
    """Where a policy comes from; written as ``senmon.json`` beside the weights."""

    renderer: Literal["tiny", "chat"]
    stage: str = "initial"
    parent: str | None = None
    """Content hash of the policy this one was trained from."""
    spec_hash: str | None = None
    snapshot: str | None = None
    metrics: dict[str, float] = Field(default_factory=dict)


@dataclass
class LoadedPolicy:
    """A policy in memory."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    renderer: Renderer
    manifest: PolicyManifest

    def engine(self) -> Engine:
        """A new embedded engine on this policy's weights (it sees in-place updates after ``sync``)."""
        from infra.inference.embedded.engine import EmbeddedEngine

        return EmbeddedEngine(self.model)

    def save(self, folder: Path, manifest: PolicyManifest) -> None:
        """Write the policy; ``folder`` appears whole or not at all, and replaces an older one.

        Raises:
            CheckFailed: a weight is NaN or infinite; nothing is written.
        """
        from transformers.utils.logging import disable_progress_bar

        broken = [name for name, weight in self.model.named_parameters() if not bool(weight.isfinite().all())]
        if broken:
            raise CheckFailed(
                f"{len(broken)} of the policy's tensors hold NaN or infinity, the first is {broken[0]}",
                where=str(folder),
                fix="lower the learning rate of this stage; the policy before it is kept",
            )
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        disable_progress_bar()
        self.model.save_pretrained(partial)
        self.tokenizer.save_pretrained(partial)
        (partial / MANIFEST).write_text(manifest.model_dump_json(indent=1) + "\n")
        sync_tree(partial)
        if folder.exists():
            shutil.rmtree(folder)
        partial.replace(folder)


def sync_tree(folder: Path) -> None:
    """Flush every file of a folder to disk, so that a rename afterwards never exposes empty files."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def policy_hash(folder: Path) -> str:
    """Content hash of a policy: weights, config and tokenizer (manifest included)."""
    return tree_hash(folder)


def build_policy(config: ModelConfig, texts: Iterable[str], seed: int) -> LoadedPolicy:
    """The model a domain starts from.

    Args:
        config: preset or path.
        texts: training text for the preset's tokenizer; unused for a path.
        seed: of the preset's initial weights.
    """
    if config.path is not None:
        return load_model_folder(config.path)
    from infra.inference.renderers.tiny import TinyRenderer

    tokenizer = train_tokenizer(texts, config.vocab_size)
    model = tiny_moe(config, len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id, seed)
    return LoadedPolicy(model, tokenizer, TinyRenderer(tokenizer), PolicyManifest(renderer="tiny"))


def tiny_moe(config: ModelConfig, vocab_size: int, pad_id: int, end_id: int, seed: int) -> PreTrainedModel:
    """A small ``GptOssForCausalLM`` in float32 with random weights from ``seed``."""
    import torch
    from transformers import GptOssForCausalLM

    from infra.compute.experts import EXPERTS, register

    register()
    settings = tiny_moe_config(config, vocab_size, pad_id, end_id)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GptOssForCausalLM._from_config(settings, attn_implementation="eager", experts_implementation=EXPERTS)
    return model.float().eval()


def tiny_moe_config(config: ModelConfig, vocab_size: int, pad_id: int, end_id: int) -> GptOssConfig:
    """The preset as transformers describes it."""
    from transformers import GptOssConfig

    return GptOssConfig(
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.expert_size,
        num_local_experts=config.experts,
        num_experts_per_tok=config.experts_per_token,
        sliding_window=config.sliding_window,
        max_position_embeddings=config.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        pad_token_id=pad_id,
        eos_token_id=end_id,
        bos_token_id=None,
        initializer_range=0.06,
    )


def load_policy(folder: Path) -> LoadedPolicy:
    """Read a policy that :meth:`LoadedPolicy.save` wrote, or any Hugging Face folder.

    Raises:
        UsageError: ``folder`` holds no model, or its manifest is broken.
    """
    if not (folder / "config.json").is_file():
        raise UsageError(f"no model in {folder}", where=str(folder), fix="give a folder with config.json and weights")
    return load_model_folder(str(folder))


def load_model_folder(path: str) -> LoadedPolicy:
    """Load a transformers model (folder or hub id) in float32, without remote code.

    Raises:
        UsageError: model or tokenizer cannot be loaded.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from infra.compute.experts import EXPERTS, register

    disable_progress_bar()
    try:
        kind = AutoConfig.from_pretrained(path, trust_remote_code=False).model_type
        options: dict[str, Any] = {"attn_implementation": "eager"}
        if kind == "gpt_oss":
            register()
            options["experts_implementation"] = EXPERTS
        model = AutoModelForCausalLM.from_pretrained(path, dtype="float32", trust_remote_code=False, **options)
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"model {path!r} cannot be loaded: {str(error).splitlines()[0]}",
            where=path,
            fix="give a folder with config.json, safetensors weights and a tokenizer, or a hub id that is reachable",
        ) from error
    manifest = _read_manifest(Path(path), tokenizer)
    renderer = make_renderer(manifest.renderer, tokenizer, _end_ids(model))
    return LoadedPolicy(model.eval(), tokenizer, renderer, manifest)


def make_renderer(kind: Literal["tiny", "chat"], tokenizer: Any, end_ids: Sequence[int] = ()) -> Renderer:
    """The renderer of a model family."""
    if kind == "tiny":
        from infra.inference.renderers.tiny import TinyRenderer

        return TinyRenderer(tokenizer)
    from infra.inference.renderers.chat import ChatRenderer

    return ChatRenderer(tokenizer, end_ids)


def _end_ids(model: Any) -> list[int]:
    """Every end id of the generation config: some models list several (end of turn, end of text)."""
    ends = model.generation_config.eos_token_id if model.generation_config is not None else None
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def _read_manifest(folder: Path, tokenizer: Any) -> PolicyManifest:
    path = folder / MANIFEST
    if not path.is_file():
        vocabulary = tokenizer.get_vocab()
        tiny = all(token in vocabulary for token in CONTROL_TOKENS)
        return PolicyManifest(renderer="tiny" if tiny else "chat")
    try:
        return PolicyManifest.model_validate(json.loads(path.read_text()))
    except ValueError as error:
        raise UsageError(f"broken policy manifest: {error}", where=str(path), fix="train or export it again") from error
