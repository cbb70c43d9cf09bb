"""The whole way: a policy in the MLflow registry, the embedded engine, a socket, the official client."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import openai
import pytest

from infra.compute.config import ModelConfig
from infra.compute.policy import build_policy
from infra.registry import Registry
from infra.settings import Settings
from serving.app import create_app
from serving.options import GatewayOptions
from serving.registry_source import RegistrySource
from tests.serving.scripted import served, wait_until

USER: list[Any] = [{"role": "user", "content": "12 + 30"}]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home")


def policy(folder: Path, seed: int) -> Path:
    """A random-weight model; another seed says other things."""
    built = build_policy(ModelConfig(preset="tiny-moe", layers=2, hidden_size=32), ["12 + 30 = 42"], seed)
    built.save(folder, built.manifest)
    return folder


def words(reply: Any) -> str:
    """The message without the ids of its calls, which are new in every reply."""
    return re.sub("call_[0-9a-f]+", "call", reply.choices[0].message.model_dump_json())


def test_a_registered_policy_is_served_and_a_promotion_takes_over_live(settings: Settings, tmp_path: Path) -> None:
    registry = Registry(settings)
    first = registry.register("sums", policy(tmp_path / "a", 1), key="a", tags={})
    registry.set_stage("sums", first.version, "staging")
    app = create_app(RegistrySource(settings), options=GatewayOptions(poll_s=0.2))
    with served(app) as running:
        wait_until(lambda: running.http.get("/readyz").status_code == 200, seconds=60)
        create = running.client.chat.completions.create

        def ask(model: str, seed: int = 5, **more: Any) -> Any:
            return create(model=model, messages=USER, max_tokens=24, seed=seed, **more)

        reply = ask("sums")
        assert (reply.model_extra or {})["model_version"] == "sums:1"
        assert reply.usage.prompt_tokens == len(USER[0]["content"]) + 2
        assert 1 <= reply.usage.completion_tokens <= 24
        assert words(ask("sums:1")) == words(reply)
        assert words(ask("sums", seed=6)) != words(reply)
        chunks = list(ask("sums@staging", stream=True, stream_options={"include_usage": True}))
        assert chunks[-1].usage == reply.usage
        streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert streamed == (reply.choices[0].message.content or "")
        with pytest.raises(openai.NotFoundError):
            ask("sums@production")
        with pytest.raises(openai.NotFoundError):
            ask("sums:99")

        second = registry.register("sums", policy(tmp_path / "b", 2), key="b", tags={})
        registry.set_stage("sums", second.version, "staging")
        registry.set_stage("sums", second.version, "production")
        wait_until(lambda: ask("sums").model_extra["model_version"] == "sums:2", seconds=30)
        assert words(ask("sums:1")) == words(reply)


def test_a_damaged_policy_is_not_served(settings: Settings, tmp_path: Path) -> None:
    registry = Registry(settings)
    version = registry.register("sums", policy(tmp_path / "a", 1), key="a", tags={})
    registry.set_stage("sums", version.version, "production")
    weights = registry.download(version) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    with served(create_app(RegistrySource(settings), options=GatewayOptions(poll_s=0.2))) as running:
        wait_until(lambda: "hash" in running.http.get("/readyz").text, seconds=60)
        assert running.http.get("/readyz").status_code == 503
        with pytest.raises(openai.InternalServerError) as caught:
            running.client.chat.completions.create(model="sums", messages=USER)
        assert (caught.value.status_code, caught.value.code) == (503, "model_load_failed")
