"""Moving versions between stages: the gate's word first, then the registry, then the ledger."""

from __future__ import annotations

import getpass
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from infra.catalog import Catalog, Promotion
from infra.errors import CheckFailed, UsageError
from infra.locks import exclusive
from infra.settings import Settings
from pipelines.gates import GateReport, GateRule, judge_gate

if TYPE_CHECKING:
    from infra.registry import ModelVersion, Registry

Target = Literal["staging", "production"]
LOCK_SECONDS = 60.0


def move(
    registry: Registry,
    catalog: Catalog,
    domain: str,
    version: int,
    to: Target,
    *,
    who: str,
    why: str,
    gate: Mapping[str, Any],
    key: str,
) -> Promotion:
    """Put a version into a stage and write the ledger; a repeated ``key`` moves nothing and returns the first entry.

    The registry moves first: after a crash between the two, repeating the call completes the ledger.

    Raises:
        CheckFailed: the version's files are gone or were altered (nothing moved), or a store is away.
    """
    ledger = catalog.promotions(domain)
    known = next((entry for entry in ledger if entry.key == key), None)
    if known is not None:
        return known
    registry.download(registry.get(domain, version))
    registry.set_stage(domain, version, to)
    return catalog.append_promotion(
        Promotion(
            key=key,
            domain=domain,
            version=version,
            from_stage=stages_by_ledger(ledger).get(version, "none"),
            to_stage=to,
            who=who,
            why=why,
            gate=dict(gate),
        )
    )


def stages_by_ledger(ledger: Sequence[Promotion]) -> dict[int, str]:
    """Replay the ledger of one domain: where each version is; whoever loses a stage is archived."""
    stages: dict[int, str] = {}
    for entry in ledger:
        for version, stage in stages.items():
            if stage == entry.to_stage and version != entry.version:
                stages[version] = "archived"
        stages[entry.version] = entry.to_stage
    return stages


def promote(settings: Settings, registry: Registry, catalog: Catalog, domain: str, to: Target, ref: str) -> Promotion:
    """Judge a registered version by its run's gate again, against what is in production now, and move it.

    Args:
        ref: ``staging`` or a version number.

    Raises:
        CheckFailed: the gate said no (nothing moved), there is no such version, its run is unknown, or its files are
            gone or altered.
    """
    with exclusive(settings, f"promotion-{domain}", wait_s=LOCK_SECONDS):
        version = registry.resolve(domain, ref)
        if version.stage == to:
            raise CheckFailed(
                f"version {version.version} of {domain} is in {to} already",
                where=f"registry, model {domain}",
                fix="nothing is to be done; see: senmon history " + domain,
            )
        gate = _judge_again(registry, catalog, version)
        gate.raise_on_failure()
        return move(
            registry,
            catalog,
            domain,
            version.version,
            to,
            who=getpass.getuser(),
            why="senmon promote",
            gate=gate.payload(),
            key=uuid.uuid4().hex,
        )


def rollback(settings: Settings, registry: Registry, catalog: Catalog, domain: str, why: str) -> Promotion:
    """Put the version that was in production before back into production.

    Raises:
        CheckFailed: there was none before, or its files are gone.
    """
    with exclusive(settings, f"promotion-{domain}", wait_s=LOCK_SECONDS):
        current = registry.resolve(domain, "production")
        target = previous_production(catalog.promotions(domain), current.version)
        if target is None:
            raise CheckFailed(
                f"{domain} had no other version in production before version {current.version}",
                where=f"ledger of {domain}",
                fix=f"promote another version: senmon promote {domain} --to production --version N",
            )
        return move(
            registry,
            catalog,
            domain,
            target,
            "production",
            who=getpass.getuser(),
            why=why,
            gate={},
            key=uuid.uuid4().hex,
        )


def previous_production(ledger: Sequence[Promotion], current: int) -> int | None:
    """The version that ``current`` replaced.

    Walks the moves into production like an undo list: a rollback takes the newest entry back instead of adding one, so
    two rollbacks in a row go back twice.
    """
    history: list[int] = []
    for entry in ledger:
        if entry.to_stage != "production":
            continue
        if len(history) > 1 and history[-2] == entry.version and not entry.gate:
            history.pop()
        elif not history or history[-1] != entry.version:
            history.append(entry.version)
    if current in history:
        history = history[: len(history) - history[::-1].index(current) - 1]
    return history[-1] if history else None


def production_metrics(registry: Registry, catalog: Catalog, domain: str) -> dict[str, float | None] | None:
    """The figures of the version in production, as its run measured them; None if there is no such version.

    A version whose run is not in this catalog has no figures: a gate that asks for a gain over it fails.
    """
    current = next((entry for entry in registry.versions(domain) if entry.stage == "production"), None)
    if current is None:
        return None
    output = _gate_output(catalog, current)
    return {} if output is None else dict(output["metrics"])


def _judge_again(registry: Registry, catalog: Catalog, version: ModelVersion) -> GateReport:
    output = _gate_output(catalog, version)
    if output is None:
        raise CheckFailed(
            f"the run that made version {version.version} of {version.domain} is not in the catalog",
            where=f"registry, model {version.domain}",
            fix="promote a version that a pipeline run registered; check SENMON_CATALOG_URL",
        )
    spec = catalog.run(version.tags["run_id"]).params["spec"]
    rules = [GateRule.model_validate(rule) for rule in spec["gates"]["promotion"]]
    return judge_gate(
        "promotion",
        rules,
        output["metrics"],
        evaluated=output["evaluated"],
        production=production_metrics(registry, catalog, version.domain),
    )


def _gate_output(catalog: Catalog, version: ModelVersion) -> dict[str, Any] | None:
    run_id = version.tags.get("run_id")
    if run_id is None:
        return None
    try:
        row = catalog.stage_result(catalog.run(run_id).run_id, "gate")
    except UsageError:
        return None
    return None if row is None else row.output
