"""Which model a domain starts from."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from infra.records import Config


class ModelConfig(Config):
    """A preset built from a config, or any Hugging Face folder or id.

    ``tiny-moe`` is a GPT-OSS type model (attention sinks, alternating sliding window, top-k experts) small
    enough to train on a laptop; its tokenizer is learnt from the snapshot's training split.
    """

    preset: Literal["tiny-moe"] | None = None
    path: str | None = None
    """Folder or hub id of a transformers causal language model; chat template and tokenizer come with it."""
    vocab_size: int = Field(default=512, ge=300)
    """Upper bound of the preset's vocabulary (256 bytes + special tokens + merges)."""
    hidden_size: int = Field(default=96, ge=8)
    layers: int = Field(default=3, ge=1)
    heads: int = Field(default=4, ge=1)
    kv_heads: int = Field(default=2, ge=1)
    head_dim: int = Field(default=24, ge=2, multiple_of=2)
    expert_size: int = Field(default=64, ge=1)
    experts: int = Field(default=4, ge=1)
    experts_per_token: int = Field(default=2, ge=1)
    sliding_window: int = Field(default=32, ge=2)
    max_positions: int = Field(default=512, ge=16)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.preset is None) == (self.path is None):
            raise ValueError("give either `preset: tiny-moe` or `path: <folder or hub id>`, not both and not neither")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token ({self.experts_per_token}) exceeds experts ({self.experts})")
        return self
