"""What ``senmon domains`` shows, from the bundled folders and the catalog alone."""

from __future__ import annotations

from infra.catalog import Catalog
from infra.records import Record
from infra.settings import Settings
from pipelines.promotion import stages_by_ledger
from pipelines.spec import BUNDLED, bundled_domains, load_domain


class DomainRow(Record):
    """One domain; None = never ran, or no version there. Versions are those of the ledger."""

    name: str
    description: str
    folder: str | None
    last_run: str | None
    last_status: str | None
    staging: int | None
    production: int | None


def list_domains(settings: Settings) -> list[DomainRow]:
    """Bundled domains, and all others that ran with this catalog, by name."""
    described = {name: load_domain(name).spec.description for name in bundled_domains()}
    with Catalog.open(settings.catalog) as catalog:
        last = {run.domain: run for run in catalog.runs()}
        rows = []
        for name in sorted(described.keys() | last.keys()):
            stages = {stage: version for version, stage in stages_by_ledger(catalog.promotions(name)).items()}
            run = last.get(name)
            rows.append(
                DomainRow(
                    name=name,
                    description=described.get(name, ""),
                    folder=str(BUNDLED / name) if name in described else None,
                    last_run=run.run_id if run else None,
                    last_status=run.status if run else None,
                    staging=stages.get("staging"),
                    production=stages.get("production"),
                )
            )
        return rows
