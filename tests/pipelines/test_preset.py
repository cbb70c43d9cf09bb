"""Defaults that depend on the model's size."""

from __future__ import annotations

from typing import Any

from pipelines.spec import TINY_RL, DomainSpec, load_domain


def spec(model: dict[str, Any], **rl: Any) -> DomainSpec:
    bundled = load_domain("arithmetic").spec.payload()
    return DomainSpec.model_validate(bundled | {"model": model, "rl": rl})


def test_the_clip_range_is_that_of_the_model() -> None:
    tiny, large = spec({"preset": "tiny-moe"}).rl, spec({"path": "/models/large"}).rl
    assert (tiny.clip.low, tiny.clip.high) == (TINY_RL["clip"]["low"], TINY_RL["clip"]["high"]) == (0.03, 0.04)
    assert (large.clip.low, large.clip.high) == (3e-4, 4e-4)
    assert tiny.guards.kl.stop == 2.0
    assert large.guards.kl.stop == 0.2
    assert (tiny.aggregation, tiny.clip.modulation_high) == ("dr", 1.0), "nothing else differs"


def test_what_a_domain_says_itself_counts() -> None:
    rl = spec({"preset": "tiny-moe"}, clip={"low": 0.1}, guards={"kl": {"stop": 5.0}}).rl
    assert (rl.clip.low, rl.clip.high) == (0.1, 0.04)
    assert (rl.guards.kl.warn, rl.guards.kl.stop) == (0.5, 5.0)
