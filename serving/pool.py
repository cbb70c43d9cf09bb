"""The models in memory: follows the registry, swaps without dropping a request, bounds what callers can load."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from infra.errors import SenmonError
from serving.errors import ApiError
from serving.models import ModelRef, ModelSource, ServedModel
from serving.observe import GatewayMetrics
from serving.options import GatewayOptions
from serving.worker import Clock, EngineWorker

logger = logging.getLogger(__name__)

Key = tuple[str, int]
"""Domain and version."""


@dataclass(eq=False)
class LoadedModel:
    """A model with its engine thread. It is closed when it is retired and its last lease has ended."""

    served: ServedModel
    worker: EngineWorker
    loaded_at: int
    leases: int = 0
    retired: bool = False


class Lease:
    """The right to use one model until :meth:`release`; a swap does not touch it."""

    def __init__(self, pool: ModelPool, model: LoadedModel) -> None:
        self.served = model.served
        self.worker = model.worker
        self._model = model
        self._pool = pool
        self._open = True
        model.leases += 1

    def release(self) -> None:
        """Give the model back. Safe to repeat."""
        if self._open:
            self._open = False
            self._model.leases -= 1
            self._pool.reap(self._model)


@dataclass(frozen=True)
class ModelCard:
    """A domain and what it serves by default."""

    domain: str
    version: int
    loaded_at: int


@dataclass
class _Retry:
    at: float
    problem: str


@dataclass
class _Table:
    loaded: dict[Key, LoadedModel] = field(default_factory=dict)
    serving: dict[str, int] = field(default_factory=dict)
    """Default version per domain."""
    extra: OrderedDict[ModelRef, int] = field(default_factory=OrderedDict)
    """Versions that callers named, least recently used first."""
    problems: dict[Key, _Retry] = field(default_factory=dict)


class ModelPool:
    """Which model answers which name, now.

    All methods run on one event loop; loading and registry calls run in threads.

    Args:
        source: where versions are resolved and loaded.
        domains: the domains to serve; None serves every domain of the source, new ones included.
        stages: where a domain's default version is looked for, in this order.
        options: limits and intervals.
        metrics: gets the ``senmon_model_loaded`` gauge.
        clock: monotonic seconds, also of the engine threads.
    """

    def __init__(
        self,
        source: ModelSource,
        domains: Sequence[str] | None,
        stages: Sequence[str],
        options: GatewayOptions,
        metrics: GatewayMetrics,
        clock: Clock = time.monotonic,
    ) -> None:
        self._source = source
        self._fixed = None if domains is None else tuple(dict.fromkeys(domains))
        self._followed: tuple[str, ...] = self._fixed or ()
        self._stages = tuple(stages)
        self._options = options
        self._metrics = metrics
        self._clock = clock
        self._table = _Table()
        self._loading = asyncio.Lock()
        self._listed = domains is not None
        self._first_look = asyncio.Event()
        self._follower: asyncio.Task[None] | None = None
        self._closers: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begin to follow the source in the background."""
        self._follower = asyncio.create_task(self._follow(), name="senmon-follow-registry")

    async def close(self) -> None:
        """Stop following and end all engine threads."""
        if self._follower is not None:
            self._follower.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._follower
        for model in list(self._table.loaded.values()):
            self._retire(model)
            self._close(model)
        await asyncio.gather(*self._closers)

    def cards(self) -> list[ModelCard]:
        """What is served by default, per domain."""
        table = self._table
        return [
            ModelCard(domain, version, table.loaded[domain, version].loaded_at)
            for domain, version in sorted(table.serving.items())
            if (domain, version) in table.loaded
        ]

    def unready(self) -> dict[str, str]:
        """Why it is not ready, per domain; empty when every domain is served."""
        problems = {} if self._first_look.is_set() else {"*": "the registry has not been read yet"}
        for domain in self._followed:
            version = self._table.serving.get(domain)
            model = None if version is None else self._table.loaded.get((domain, version))
            if model is None:
                failed = [retry.problem for key, retry in self._table.problems.items() if key[0] == domain]
                problems[domain] = failed[-1] if failed else f"no version at {' or '.join(self._stages)}"
            elif not model.worker.alive:
                problems[domain] = "the engine has stopped and is being restarted"
        return problems

    async def lease(self, ref: ModelRef) -> Lease:
        """The model behind a name.

        Raises:
            ApiError: 404 when there is none, 503 while it loads or cannot be loaded.
        """
        if ref.domain not in self._followed:
            raise _unknown(ref) if self._listed else _loading(ref)
        version = await self._extra_version(ref) if ref.target else self._table.serving.get(ref.domain)
        if version is None:
            raise self._absent(ref)
        model = self._table.loaded.get((ref.domain, version))
        if model is None or not model.worker.alive:
            raise _loading(ref)
        return Lease(self, model)

    async def refresh(self) -> None:
        """Look at the source once, and load, swap and retire accordingly."""
        if self._fixed is None:
            self._followed = tuple(await asyncio.to_thread(self._source.domains))
            self._listed = True  # before the models are loaded, which may take minutes
            for gone in self._table.serving.keys() - set(self._followed):
                del self._table.serving[gone]
        for domain in self._followed:
            version = await self._default_version(domain)
            if version is None:
                continue  # what is served stays in service
            if await self._ensure((domain, version)):
                self._swap(domain, version)
        for ref in list(self._table.extra):
            version = await asyncio.to_thread(self._source.resolve, ref.domain, ref.target)
            if version is None:
                self._table.extra.pop(ref, None)
            elif await self._ensure((ref.domain, version)) and ref in self._table.extra:
                self._table.extra[ref] = version
        self._retire_unused()

    def reap(self, model: LoadedModel) -> None:
        """Close a retired model that nobody uses any more."""
        if model.retired and model.leases == 0:
            self._close(model)

    def _absent(self, ref: ModelRef) -> ApiError:
        if ref.target:
            return _unknown(ref)  # the source itself was asked
        if not self._first_look.is_set():
            return _loading(ref)
        if any(domain == ref.domain for domain, _ in self._table.problems):
            return _broken(ref)
        return _unknown(ref)

    async def _follow(self) -> None:
        while True:
            try:
                await self.refresh()
                self._first_look.set()
            except Exception as error:  # an unreachable registry must not take the service down
                logger.warning("the registry cannot be read, the loaded models stay: %s", _first_line(error))
            await asyncio.sleep(self._options.poll_s)

    async def _default_version(self, domain: str) -> int | None:
        for stage in self._stages:
            version = await asyncio.to_thread(self._source.resolve, domain, stage)
            if version is not None:
                return version
        return None

    def _swap(self, domain: str, version: int) -> None:
        before = self._table.serving.get(domain)
        if before is None:
            logger.info("model %s: version %d is ready", domain, version)
        elif before != version:
            logger.info("model %s: switched from version %d to version %d", domain, before, version)
        self._table.serving[domain] = version

    async def _extra_version(self, ref: ModelRef) -> int | None:
        """Version of a stage or number that a caller named; loaded on demand, within bounds."""
        table = self._table
        if ref in table.extra:
            table.extra.move_to_end(ref)
            return table.extra[ref]
        try:
            version = await asyncio.to_thread(self._source.resolve, ref.domain, ref.target)
        except Exception as error:
            logger.warning("the registry cannot be read: %s", _first_line(error))
            raise ApiError(
                503, "The model registry cannot be reached.", code="registry_unavailable", retry_after=5
            ) from None
        if version is None or table.serving.get(ref.domain) == version:
            return version
        if ref not in table.extra:
            self._make_room()
            table.extra[ref] = version
        if not await self._ensure((ref.domain, version)):
            table.extra.pop(ref, None)
            raise _broken(ref)
        return version

    def _make_room(self) -> None:
        """Forget the least recently used extra model that nobody is using.

        Raises:
            ApiError: 503, all are in use.
        """
        table = self._table
        if len(table.extra) < self._options.max_extra_models:
            return
        for ref, version in table.extra.items():
            model = table.loaded.get((ref.domain, version))
            if model is not None and model.leases == 0:
                del table.extra[ref]
                self._retire_unused()
                return
        raise ApiError(503, "Too many model versions are in use.", code="too_many_models", retry_after=5)

    async def _ensure(self, key: Key) -> bool:
        """Have this version in memory; False when it cannot be loaded (now)."""
        async with self._loading:
            model = self._table.loaded.get(key)
            if model is not None and model.worker.alive:
                return True
            retry = self._table.problems.get(key)
            if retry is not None and self._clock() < retry.at:
                return False
            try:
                served = await asyncio.to_thread(self._source.load, *key)
            except Exception as error:
                problem = f"version {key[1]} cannot be loaded: {_first_line(error)}"
                logger.error("domain %s: %s", key[0], problem, exc_info=not isinstance(error, SenmonError))
                self._table.problems[key] = _Retry(self._clock() + self._options.retry_load_s, problem)
                return False
            self._table.problems.pop(key, None)
            if model is not None:
                self._retire(model)
            self._add(key, served)
            return True

    def _add(self, key: Key, served: ServedModel) -> None:
        options = self._options
        worker = EngineWorker(
            served.engine,
            f"senmon-engine-{key[0]}-{key[1]}",
            max_running=options.max_running,
            max_waiting=options.max_waiting,
            clock=self._clock,
        )
        self._table.loaded[key] = LoadedModel(served, worker, loaded_at=int(time.time()))
        self._metrics.model_loaded.labels(key[0], str(key[1])).set(1)

    def _retire_unused(self) -> None:
        table = self._table
        used = set(table.serving.items()) | {(ref.domain, version) for ref, version in table.extra.items()}
        for key, model in list(table.loaded.items()):
            if key not in used:
                self._retire(model)

    def _retire(self, model: LoadedModel) -> None:
        """No new leases; it ends when the open ones have ended."""
        key = (model.served.domain, model.served.version)
        if self._table.loaded.get(key) is model:
            del self._table.loaded[key]
        self._metrics.model_loaded.labels(key[0], str(key[1])).set(0)
        model.retired = True
        self.reap(model)

    def _close(self, model: LoadedModel) -> None:
        closer = asyncio.get_running_loop().create_task(asyncio.to_thread(model.worker.close))
        self._closers.add(closer)
        closer.add_done_callback(self._closers.discard)


def _unknown(ref: ModelRef) -> ApiError:
    name = ref.domain + (f" ({ref.target})" if ref.target else "")
    return ApiError(404, f"The model '{name}' does not exist.", code="model_not_found", param="model")


def _loading(ref: ModelRef) -> ApiError:
    return ApiError(503, f"The model '{ref.domain}' is being loaded.", code="model_loading", retry_after=1)


def _broken(ref: ModelRef) -> ApiError:
    return ApiError(503, f"The model '{ref.domain}' cannot be loaded.", code="model_load_failed", retry_after=30)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
