"""How the gateway behaves; the defaults fit one machine."""

from __future__ import annotations

from pydantic import Field

from infra.records import Config


class GatewayOptions(Config):
    """Limits and intervals of one gateway."""

    poll_s: float = Field(default=3.0, gt=0)
    """Seconds between two looks at the registry."""
    retry_load_s: float = Field(default=30.0, gt=0)
    """Seconds before a version that failed to load is tried again."""
    max_running: int = Field(default=32, ge=1)
    """Sequences that one engine decodes together."""
    max_waiting: int = Field(default=128, ge=0)
    """Requests that may wait for one engine; more are refused with 503."""
    max_extra_models: int = Field(default=2, ge=0)
    """Models loaded because a request named a stage or version that its domain does not serve by default."""
    max_body_bytes: int = Field(default=8 * 1024 * 1024, ge=1)
    """Larger request bodies are refused with 413."""
    default_max_tokens: int = Field(default=2048, ge=1)
    """Sampled tokens when the caller sets no limit (never beyond the model's context)."""
    reasoning_content: bool = True
    """Repeat ``reasoning`` as ``reasoning_content`` for older clients."""
    ping_s: float = Field(default=15.0, gt=0)
    """Seconds between keep-alive comments in a stream."""
    drain_s: float = Field(default=30.0, ge=0)
    """Seconds which open requests get to finish when the gateway stops."""
