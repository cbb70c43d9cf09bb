from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from infra.inference.engine import SamplingParams
from serving.errors import ApiError
from serving.models import ModelRef, ServedModel
from serving.observe import GatewayMetrics
from serving.options import GatewayOptions
from serving.pool import Lease, ModelPool
from serving.worker import Piece
from tests.serving.scripted import ScriptedEngine, ScriptedSource, wait_until

STAGES = ("production", "staging")


def source(*versions: int, **stages: int) -> ScriptedSource:
    engines = {("demo", version): ScriptedEngine(lambda _: [5] * 100_000, step_s=0.001) for version in versions}
    return ScriptedSource(engines, {("demo", stage): version for stage, version in stages.items()})


@asynccontextmanager
async def pool(
    models: ScriptedSource, domains: tuple[str, ...] | None = ("demo",), **options: Any
) -> AsyncIterator[ModelPool]:
    """A pool that looks at its source when the test says so."""
    running = ModelPool(models, domains, STAGES, GatewayOptions(poll_s=3600, **options), GatewayMetrics())
    await running.start()
    try:
        await asyncio.wait_for(_looked(running), 5)
        yield running
    finally:
        await running.close()


async def _looked(running: ModelPool) -> None:
    while "*" in running.unready():
        await asyncio.sleep(0.005)


async def leased(running: ModelPool, name: str = "demo") -> Lease:
    return await running.lease(ModelRef.parse(name))


async def failure(running: ModelPool, name: str) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await leased(running, name)
    return caught.value


@pytest.mark.parametrize(
    ("text", "ref"),
    [
        ("invoice_approval", ModelRef("invoice_approval")),
        ("invoice_approval@staging", ModelRef("invoice_approval", "staging")),
        ("invoice_approval:007", ModelRef("invoice_approval", "7")),
    ],
)
def test_names(text: str, ref: ModelRef) -> None:
    assert ModelRef.parse(text) == ref


@pytest.mark.parametrize("text", ["", "a b", "../etc", "a@", "a:", "a:x", "a@s:1", "a\n", "http://x", "A"])
def test_strange_names_are_refused(text: str) -> None:
    with pytest.raises(ApiError) as caught:
        ModelRef.parse(text)
    assert (caught.value.status, caught.value.param) == (400, "model")


async def test_production_comes_before_staging() -> None:
    async with pool(source(1, 2, production=1, staging=2)) as running:
        assert (await leased(running)).served.version == 1
    async with pool(source(1, 2, staging=2)) as running:
        assert (await leased(running)).served.version == 2


async def test_a_new_version_takes_over_and_the_old_one_finishes_its_requests() -> None:
    models = source(1, 2, production=1)
    async with pool(models) as running:
        old = await leased(running)
        generation = old.worker.submit([7], SamplingParams(max_tokens=100_000))
        await generation.next()
        models.stages["demo", "production"] = 2
        await running.refresh()
        assert (await leased(running)).served.version == 2
        await asyncio.sleep(0.05)
        assert old.worker.alive
        assert isinstance(await generation.next(), Piece)
        generation.cancel()
        old.release()
        await asyncio.to_thread(wait_until, lambda: not old.worker.alive)
        assert models.engines["demo", 1].open == 0
    assert models.loads == [("demo", 1), ("demo", 2)]


async def test_a_version_that_only_changes_its_stage_is_not_loaded_again() -> None:
    models = source(1, staging=1)
    async with pool(models) as running:
        models.stages = {("demo", "production"): 1}
        await running.refresh()
        assert (await leased(running)).served.version == 1
    assert models.loads == [("demo", 1)]


async def test_an_outage_of_the_registry_changes_nothing() -> None:
    models = source(1, production=1)
    async with pool(models) as running:
        models.outage = True
        with pytest.raises(ConnectionError):
            await running.refresh()
        assert (await leased(running)).served.version == 1
        assert running.unready() == {}
        assert (await failure(running, "demo@staging")).code == "registry_unavailable"


async def test_the_follower_survives_an_outage() -> None:
    models = source(1, 2, production=1)
    models.outage = True
    running = ModelPool(models, ("demo",), STAGES, GatewayOptions(poll_s=0.01), GatewayMetrics())
    await running.start()
    await asyncio.sleep(0.05)
    assert (await failure(running, "demo")).status == 503
    models.outage = False
    await asyncio.wait_for(_looked(running), 5)
    assert (await leased(running)).served.version == 1
    await running.close()


async def test_a_version_that_cannot_be_loaded_leaves_the_old_one_in_service() -> None:
    models = source(1, 2, production=1)
    models.broken.add(("demo", 2))
    async with pool(models, retry_load_s=3600) as running:
        models.stages["demo", "production"] = 2
        await running.refresh()
        await running.refresh()
        assert (await leased(running)).served.version == 1
        assert models.loads.count(("demo", 2)) == 1, "it is not tried again at every look"
        assert (await failure(running, "demo:2")).code == "model_load_failed"


async def test_a_domain_without_a_version_is_unready_until_there_is_one() -> None:
    models = source(1)
    async with pool(models) as running:
        assert running.unready() == {"demo": "no version at production or staging"}
        assert (await failure(running, "demo")).code == "model_not_found"
        models.stages["demo", "staging"] = 1
        await running.refresh()
        assert running.unready() == {}


async def test_domains_outside_the_list_are_unknown() -> None:
    models = source(1, production=1)
    models.engines["other", 1] = ScriptedEngine(lambda _: [5])
    models.stages["other", "production"] = 1
    async with pool(models) as running:
        assert (await failure(running, "other")).status == 404
    async with pool(models, domains=None) as running:
        assert [card.domain for card in running.cards()] == ["demo", "other"]
        del models.engines["other", 1]
        await running.refresh()
        assert (await failure(running, "other")).status == 404
        assert [card.domain for card in running.cards()] == ["demo"]


async def test_names_are_known_as_soon_as_the_list_is_read_however_long_models_load() -> None:
    """Before that nobody can say whether a name exists; after it, an unknown one is no reason to come again."""
    models = source(1, production=1)
    listed, go_on = threading.Event(), threading.Event()
    load, domains = models.load, models.domains

    def slow_list() -> list[str]:
        listed.wait(5)
        return domains()

    def slow_load(domain: str, version: int) -> ServedModel:
        go_on.wait(5)
        return load(domain, version)

    models.domains, models.load = slow_list, slow_load  # type: ignore[method-assign]
    running = ModelPool(models, None, STAGES, GatewayOptions(poll_s=3600), GatewayMetrics())
    await running.start()
    try:
        assert (await failure(running, "nosuch")).code == "model_loading"
        listed.set()
        await asyncio.wait_for(_not_loading(running, "nosuch"), 5)
        assert (await failure(running, "demo")).code == "model_loading"
        assert (await failure(running, "demo@staging")).code == "model_not_found"
        go_on.set()
        await asyncio.wait_for(_looked(running), 5)
        assert (await leased(running)).served.version == 1
    finally:
        go_on.set()
        await running.close()


async def _not_loading(running: ModelPool, name: str) -> None:
    while (await failure(running, name)).code != "model_not_found":
        await asyncio.sleep(0.005)


async def test_one_line_is_logged_when_a_model_is_ready_and_when_it_is_switched(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "serving.pool")
    models = source(1, 2, production=1)
    async with pool(models) as running:
        await running.refresh()
        models.stages["demo", "production"] = 2
        await running.refresh()
    assert [record.message for record in caplog.records] == [
        "model demo: version 1 is ready",
        "model demo: switched from version 1 to version 2",
    ]


async def test_stages_and_versions_are_loaded_on_demand_within_bounds() -> None:
    models = source(1, 2, 3, production=1, staging=2)
    async with pool(models, max_extra_models=1) as running:
        staging = await leased(running, "demo@staging")
        assert staging.served.version == 2
        assert (await failure(running, "demo:3")).code == "too_many_models"
        assert (await failure(running, "demo:9")).status == 404
        staging.release()
        third = await leased(running, "demo:3")
        assert third.served.version == 3
        assert (await leased(running, "demo:1")).served.version == 1
        await asyncio.to_thread(wait_until, lambda: not staging.worker.alive)
    assert models.loads == [("demo", 1), ("demo", 2), ("demo", 3)]


async def test_a_named_stage_follows_the_registry_too() -> None:
    models = source(1, 2, 3, production=1, staging=2)
    async with pool(models) as running:
        (await leased(running, "demo@staging")).release()
        models.stages["demo", "staging"] = 3
        await running.refresh()
        assert (await leased(running, "demo@staging")).served.version == 3
        del models.stages["demo", "staging"]
        await running.refresh()
        assert (await failure(running, "demo@staging")).status == 404


async def test_a_broken_engine_is_replaced() -> None:
    models = source(1, production=1)

    def explode() -> None:
        raise RuntimeError("device lost")

    async with pool(models) as running:
        lease = await leased(running)
        models.engines["demo", 1].before_step = explode
        lease.worker.submit([1], SamplingParams(max_tokens=5))
        await asyncio.to_thread(wait_until, lambda: not lease.worker.alive)
        assert running.unready() == {"demo": "the engine has stopped and is being restarted"}
        assert (await failure(running, "demo")).code == "model_loading"
        models.engines["demo", 1] = ScriptedEngine(lambda _: [5] * 9)
        await running.refresh()
        assert (await leased(running)).worker.alive
        assert running.unready() == {}
