"""``senmon doctor``: what is installed, reachable and missing."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from infra.errors import SenmonError
from infra.records import Record
from infra.settings import Settings

REQUIRED = (
    "torch",
    "transformers",
    "prefect",
    "mlflow",
    "great-expectations",
    "datacontract-cli",
    "sqlalchemy",
    "fastapi",
    "openai",
    "pyarrow",
    "reasoning-gym",
)
OPTIONAL = {"psycopg": "postgres", "deepspeed": "deepspeed", "prefect-ray": "ray", "kernels": "gpu"}
LOW_DISK_BYTES = 2 << 30
PROBE_SECONDS = 5.0
PUBLISHED_HEAD_DIM = 64
"""Of GPT-OSS."""


class Check(Record):
    """One finding; ``missing`` is something optional, ``failed`` something that a run needs."""

    name: str
    state: Literal["ok", "missing", "failed"]
    detail: str
    fix: str = ""


def examine(settings: Settings) -> list[Check]:
    """All findings: Python, packages, disk, catalog, MLflow, Prefect, accelerator, attention, plug-ins, domains."""
    return [
        _python(),
        *(_package(name, None) for name in REQUIRED),
        *(_package(name, extra) for name, extra in OPTIONAL.items()),
        _disk(settings),
        _attempt("catalog", settings.catalog, lambda: _catalog(settings)),
        _attempt("mlflow", settings.tracking, lambda: _mlflow(settings)),
        _prefect(),
        _accelerator(settings),
        *_attention(),
        *_plugins(),
        *_bundled(),
    ]


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= (3, 11)
    return Check(
        name="python", state="ok" if good else "failed", detail=version, fix="" if good else "use 3.11 or newer"
    )


def _package(name: str, extra: str | None) -> Check:
    try:
        return Check(name=name, state="ok", detail=importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        fix = "make install" if extra is None else f"pip install 'senmon[{extra}]'"
        return Check(name=name, state="failed" if extra is None else "missing", detail="not installed", fix=fix)


def _disk(settings: Settings) -> Check:
    folder = next(path for path in (settings.root, *settings.root.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    low = free < LOW_DISK_BYTES
    return Check(
        name="disk",
        state="failed" if low else "ok",
        detail=f"{free / 2**30:.1f} GiB free for {settings.root}",
        fix="free some space, or set SENMON_HOME elsewhere" if low else "",
    )


def _attempt(name: str, target: str, probe: Callable[[], str]) -> Check:
    try:
        return Check(name=name, state="ok", detail=probe())
    except SenmonError as error:
        return Check(name=name, state="failed", detail=error.what, fix=error.fix)
    except Exception as error:  # a broken library is what this command looks for
        return Check(name=name, state="failed", detail=f"{type(error).__name__}: {error}", fix=f"check {name}")


def _catalog(settings: Settings) -> str:
    from infra.catalog import Catalog

    catalog = Catalog.open_existing(settings.catalog)
    if catalog is None:
        return f"none yet; the first run makes {_without_password(settings.catalog)}"
    with catalog:
        return f"{len(catalog.runs())} runs in {_without_password(settings.catalog)}"


def _mlflow(settings: Settings) -> str:
    from sqlalchemy import make_url

    from infra.mlflow_client import served
    from infra.registry import Registry

    if not served(settings):
        url = make_url(settings.tracking)
        if url.drivername == "sqlite" and not Path(str(url.database)).exists():
            return f"none yet; the first run makes {_without_password(settings.tracking)}"
    return f"{len(Registry(settings).domains())} registered domains in {_without_password(settings.tracking)}"


def _without_password(url: str) -> str:
    from sqlalchemy import make_url

    return url if url.startswith("http") else make_url(url).render_as_string(hide_password=True)


def _prefect() -> Check:
    url = os.environ.get("PREFECT_API_URL")
    if not url:
        return Check(name="prefect server", state="ok", detail="embedded: each run starts its own")
    try:
        urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=PROBE_SECONDS).close()
    except (OSError, ValueError) as error:
        return Check(
            name="prefect server", state="failed", detail=f"{url}: {error}", fix="start it or unset PREFECT_API_URL"
        )
    return Check(name="prefect server", state="ok", detail=url)


def _accelerator(settings: Settings) -> Check:
    import torch

    if torch.cuda.is_available():
        return Check(name="accelerator", state="ok", detail=torch.cuda.get_device_name())
    threads = settings.threads or torch.get_num_threads()
    return Check(
        name="accelerator", state="missing", detail=f"none; {threads} CPU threads", fix="enough for tests and demo"
    )


def _attention() -> list[Check]:
    """The kernel that models with learned sinks train with, and every one that cannot be used here."""
    import torch

    from infra.compute.attention.choice import available, choose

    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)

    def chosen() -> str:
        usable = [kernel.name for kernel in available() if kernel.why_not is None]
        name = choose(torch.device(device), dtype, PUBLISHED_HEAD_DIM).name
        return f"{name}; usable: {', '.join(usable)}"

    check = _attempt("attention", "attention", chosen)
    if check.state == "failed":
        return [check]
    fix = "not needed: the kernel above computes the same"
    others = [(kernel.name, kernel.why_not) for kernel in available() if kernel.why_not is not None]
    return [check, *(Check(name=f"attention: {name}", state="missing", detail=why, fix=fix) for name, why in others)]


def _plugins() -> list[Check]:
    from domain_rewards.plugins import discover

    return [
        Check(
            name=f"{plugin.group.removeprefix('senmon.')}: {plugin.name}",
            state="ok" if plugin.error is None else "failed",
            detail=plugin.error or f"{plugin.reference} ({plugin.distribution})",
            fix="" if plugin.error is None else f"repair or uninstall {plugin.distribution}",
        )
        for plugin in discover()
    ]


def _bundled() -> list[Check]:
    from pipelines.spec import bundled_domains, load_domain

    def load(name: str) -> str:
        return f"valid, {load_domain(name).spec_hash[:12]}"

    return [_attempt(f"domain: {name}", name, lambda name=name: load(name)) for name in bundled_domains()]  # type: ignore[misc]
