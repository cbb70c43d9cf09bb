"""What ``senmon domains`` and ``senmon history`` show, from the bundled folders and the catalog alone."""

from __future__ import annotations

from collections.abc import Sequence

from infra.catalog import Catalog, Promotion, RunRow
from infra.errors import UsageError
from infra.records import Record
from infra.settings import Settings
from infra.yaml_file import did_you_mean
from pipelines.promotion import stages_by_ledger
from pipelines.spec import BUNDLED, SPEC_FILE, bundled_domains, domain_name, load_domain


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
    """Bundled domains, and all others that ran with this catalog, by name; where there is no catalog none is made."""
    described = {name: load_domain(name).spec.description for name in bundled_domains()}
    catalog = Catalog.open_existing(settings.catalog)
    if catalog is None:
        return [_row(name, description, None, ()) for name, description in sorted(described.items())]
    with catalog:
        last = {run.domain: run for run in catalog.runs()}
        rows = []
        for name in sorted(described.keys() | set(catalog.domains())):
            run = last.get(name)
            told = str(run.params.get("spec", {}).get("description", "")) if run else ""
            rows.append(_row(name, described.get(name, told), run, catalog.promotions(name)))
        return rows


def domain_history(settings: Settings, reference: str) -> tuple[str, Sequence[Promotion]]:
    """A domain's name and its ledger, oldest first; where there is no catalog none is made.

    Args:
        reference: a bundled name, a folder, or the name of a domain that ran from a folder.

    Raises:
        UsageError: nobody knows this domain.
    """
    name = domain_name(reference)
    catalog = Catalog.open_existing(settings.catalog)
    known: Sequence[str] = ()
    ledger: Sequence[Promotion] = ()
    if catalog is not None:
        with catalog:
            known, ledger = catalog.domains(), catalog.promotions(name)
    if name == reference and name not in known and name not in bundled_domains():
        names = sorted({*known, *bundled_domains()})
        raise UsageError(
            f"unknown domain {name!r}{did_you_mean(name, names)}",
            where="DOMAIN",
            fix=f"use a name that ran here or is bundled ({', '.join(names)}), or a folder that holds {SPEC_FILE}",
        )
    return name, ledger


def _row(name: str, description: str, run: RunRow | None, ledger: Sequence[Promotion]) -> DomainRow:
    stages = {stage: version for version, stage in stages_by_ledger(ledger).items()}
    return DomainRow(
        name=name,
        description=description,
        folder=str(BUNDLED / name) if name in bundled_domains() else None,
        last_run=run.run_id if run else None,
        last_status=run.status if run else None,
        staging=stages.get("staging"),
        production=stages.get("production"),
    )
