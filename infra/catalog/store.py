"""The catalog itself: records by content hash, runs, stage results, and the promotion ledger."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from infra.catalog.engine import connect, explained, parse_url, upgrade
from infra.catalog.records import UNFINISHED, Promotion, RecordRow, RunRow, RunStatus, StageRow, utc_now
from infra.catalog.tables import PROMOTIONS, RECORDS, RUNS, STAGES
from infra.errors import CheckFailed, UsageError
from infra.hashing import canonical_json, content_hash
from infra.names import check_domain
from infra.records import Record

R = TypeVar("R", bound=Record)

RUN_COLUMNS = [column for column in RUNS.c if column.name != "seq"]
PROMOTION_COLUMNS = [column for column in PROMOTIONS.c if column.name != "seq"]


class Catalog:
    """One database that remembers everything; make it with :meth:`open`.

    Every method is one transaction: what it writes appears whole or not at all. Safe from many threads and processes.
    Each method raises :class:`CheckFailed` when the database is away or stays locked.
    """

    def __init__(self, engine: sa.Engine, url: sa.URL) -> None:
        self._url = url
        self._engine = engine
        self._reader = engine.execution_options(read_only=True)

    @classmethod
    def open(cls, url: str) -> Self:
        """Connects to ``url`` (see ``Settings.catalog``), creates what is missing and migrates to the newest schema.

        Raises:
            UsageError: the URL names no database we support.
            CheckFailed: the database is away, or was written by a newer version.
        """
        parsed = parse_url(url)
        engine = connect(parsed)
        try:
            with explained(parsed):
                upgrade(engine)
        except BaseException:
            engine.dispose()
            raise
        return cls(engine, parsed)

    @classmethod
    def open_existing(cls, url: str) -> Self | None:
        """As :meth:`open`, but creates no SQLite file: None where there is none yet."""
        parsed = parse_url(url)
        if parsed.drivername == "sqlite" and not Path(str(parsed.database)).exists():
            return None
        return cls.open(url)

    def close(self) -> None:
        """Closes all connections."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Records ---------------------------------------------------------------------------------------------------------

    def put(self, record: Record, kind: str | None = None) -> str:
        """Stores ``record`` under ``kind`` (default: its class name) and returns its content hash; again is a no-op.

        Raises:
            CheckFailed: it holds a NaN or an infinity, which JSON cannot carry.
        """
        payload = _json(record.payload(), where=type(record).__name__)
        record_id = content_hash(json.loads(payload))
        values = {
            "kind": kind or type(record).__name__,
            "record_id": record_id,
            "payload": payload,
            "created_at": utc_now(),
        }
        with explained(self._url), self._engine.begin() as connection:
            connection.execute(_insert(connection, RECORDS).values(values).on_conflict_do_nothing())
        return record_id

    def get(self, type_: type[R], record_id: str, kind: str | None = None) -> R:
        """The stored record.

        Raises:
            UsageError: no such record.
            CheckFailed: what is stored does not have this hash any more.
        """
        name = kind or type_.__name__
        query = sa.select(RECORDS.c.payload).where(RECORDS.c.kind == name, RECORDS.c.record_id == record_id)
        row = self._one(query)
        where = f"{name} {record_id} in {self._url}"
        if row is None:
            raise UsageError(f"the catalog has no such {name}", where=where, fix="check the id and the catalog URL")
        payload = json.loads(row.payload)
        if content_hash(payload) != record_id:
            raise CheckFailed(
                "a stored record was altered: its content has another hash",
                where=where,
                fix="restore the catalog from a backup; records are never edited",
            )
        return type_.model_validate(payload)

    def list(self, kind: str) -> Sequence[RecordRow]:
        """All records of one kind, oldest first."""
        query = sa.select(RECORDS).where(RECORDS.c.kind == kind).order_by(RECORDS.c.created_at, RECORDS.c.record_id)
        return [
            RecordRow(
                record_id=row.record_id, kind=row.kind, content=json.loads(row.payload), created_at=row.created_at
            )
            for row in self._all(query)
        ]

    # Runs and stages -------------------------------------------------------------------------------------------------

    def start_run(self, domain: str, spec_hash: str, params: dict[str, Any]) -> RunRow:
        """A new run, status ``running``. Its id is short, unique, and sorts by time."""
        now = utc_now()
        row = RunRow(
            run_id=f"{now:%Y%m%d-%H%M%S}{now.microsecond // 1000:03d}-{secrets.token_hex(2)}",
            domain=check_domain(domain),
            spec_hash=spec_hash,
            params=_plain(params, where=f"parameters of a run of {domain}"),
            status="running",
            summary={},
            created_at=now,
            finished_at=None,
        )
        with explained(self._url), self._engine.begin() as connection:
            connection.execute(sa.insert(RUNS).values(_values(row)))
        return row

    def run(self, run_id: str) -> RunRow:
        """One run; :class:`UsageError` if there is none with this id."""
        row = self._one(sa.select(*RUN_COLUMNS).where(RUNS.c.run_id == run_id))
        if row is None:
            raise self._no_run(run_id)
        return RunRow.model_validate(dict(row._mapping))

    def runs(self, domain: str | None = None) -> Sequence[RunRow]:
        """All runs (of one domain), oldest first."""
        query = sa.select(*RUN_COLUMNS).order_by(RUNS.c.seq)
        if domain is not None:
            query = query.where(RUNS.c.domain == domain)
        return [RunRow.model_validate(dict(row._mapping)) for row in self._all(query)]

    def domains(self) -> Sequence[str]:
        """Names of all domains that ran or moved a version, sorted."""
        query = sa.union(sa.select(RUNS.c.domain), sa.select(PROMOTIONS.c.domain))
        return sorted(row.domain for row in self._all(query))

    def latest_unfinished(self, domain: str) -> RunRow | None:
        """The domain's newest run if it can be resumed; an older one is superseded, and is never returned."""
        query = sa.select(*RUN_COLUMNS).where(RUNS.c.domain == domain).order_by(RUNS.c.seq.desc()).limit(1)
        row = self._one(query)
        newest = None if row is None else RunRow.model_validate(dict(row._mapping))
        return newest if newest is not None and newest.unfinished else None

    def reopen_run(self, run_id: str) -> RunRow:
        """Marks an unfinished run as ``running`` again, to resume it.

        Raises:
            UsageError: no such run.
            CheckFailed: the run is final.
        """
        return self._set_status(run_id, "running", {}, finished=False)

    def finish_run(self, run_id: str, status: RunStatus, summary: dict[str, Any]) -> RunRow:
        """Ends a run. Repeating the same end is a no-op.

        Raises:
            UsageError: no such run.
            CheckFailed: the run has another final status or summary already, or the summary holds a NaN.
        """
        return self._set_status(run_id, status, _plain(summary, where=f"summary of run {run_id}"), finished=True)

    def _set_status(self, run_id: str, status: RunStatus, summary: dict[str, Any], *, finished: bool) -> RunRow:
        change = {"status": status, "summary": summary, "finished_at": utc_now() if finished else None}
        statement = sa.update(RUNS).where(RUNS.c.run_id == run_id, RUNS.c.status.in_(UNFINISHED)).values(change)
        with explained(self._url), self._engine.begin() as connection:
            changed = connection.execute(statement).rowcount
        row = self.run(run_id)
        if not changed and (row.status, row.summary) != (status, summary):
            raise CheckFailed(
                f"this run ended already, as {row.status}",
                where=f"run {run_id}",
                fix="start a new run; a final status is never rewritten",
            )
        return row

    def save_stage(
        self, run_id: str, stage: str, inputs_hash: str, output: dict[str, Any], seconds: float | None = None
    ) -> StageRow:
        """Records that ``stage`` finished with ``output`` (ids, URIs and numbers); replaces an earlier result.

        Raises:
            UsageError: no such run.
            CheckFailed: the output holds a NaN.
        """
        row = StageRow(
            run_id=run_id,
            stage=stage,
            inputs_hash=inputs_hash,
            output=_plain(output, where=f"output of stage {stage} of run {run_id}"),
            seconds=seconds,
            created_at=utc_now(),
        )
        values = _values(row)
        change = {name: value for name, value in values.items() if name not in ("run_id", "stage")}
        try:
            with explained(self._url), self._engine.begin() as connection:
                insert = _insert(connection, STAGES).values(values)
                connection.execute(insert.on_conflict_do_update(index_elements=["run_id", "stage"], set_=change))
        except sa.exc.IntegrityError as error:
            raise self._no_run(run_id) from error
        return row

    def stage_result(self, run_id: str, stage: str) -> StageRow | None:
        """The result of a finished stage. Whether it still fits its inputs is the caller's question (inputs_hash)."""
        row = self._one(sa.select(STAGES).where(STAGES.c.run_id == run_id, STAGES.c.stage == stage))
        return None if row is None else StageRow.model_validate(dict(row._mapping))

    def stages(self, run_id: str) -> Sequence[StageRow]:
        """All finished stages of a run, in the order in which they ended."""
        query = sa.select(STAGES).where(STAGES.c.run_id == run_id).order_by(STAGES.c.created_at, STAGES.c.stage)
        return [StageRow.model_validate(dict(row._mapping)) for row in self._all(query)]

    # The ledger ------------------------------------------------------------------------------------------------------

    def append_promotion(self, promotion: Promotion) -> Promotion:
        """Appends to the ledger and returns its entry; the same key again returns the first entry.

        Raises:
            CheckFailed: the key is taken by an entry that says something else.
        """
        check_domain(promotion.domain)
        _plain(promotion.gate, where=f"gate result of promotion {promotion.key}")
        query = sa.select(*PROMOTION_COLUMNS).where(PROMOTIONS.c.key == promotion.key)
        try:
            with explained(self._url), self._engine.begin() as connection:
                connection.execute(sa.insert(PROMOTIONS).values(_values(promotion)))
            return promotion
        except sa.exc.IntegrityError:
            row = self._one(query)
            if row is None:
                raise
        first = Promotion.model_validate(dict(row._mapping))
        if first.model_copy(update={"created_at": promotion.created_at}) != promotion:
            raise CheckFailed(
                "the ledger has another entry under this key",
                where=f"promotion {promotion.key}",
                fix="use a new key for a new promotion; entries are never rewritten",
            )
        return first

    def promotions(self, domain: str | None = None) -> Sequence[Promotion]:
        """The ledger (of one domain), oldest first."""
        query = sa.select(*PROMOTION_COLUMNS).order_by(PROMOTIONS.c.seq)
        if domain is not None:
            query = query.where(PROMOTIONS.c.domain == domain)
        return [Promotion.model_validate(dict(row._mapping)) for row in self._all(query)]

    def _one(self, query: sa.Select[Any]) -> sa.Row[Any] | None:
        with explained(self._url), self._reader.connect() as connection:
            return connection.execute(query).one_or_none()

    def _all(self, query: sa.Select[Any] | sa.CompoundSelect[Any]) -> Sequence[sa.Row[Any]]:
        with explained(self._url), self._reader.connect() as connection:
            return connection.execute(query).all()

    def _no_run(self, run_id: str) -> UsageError:
        return UsageError(
            "the catalog has no such run", where=f"run {run_id} in {self._url}", fix="check the id and the catalog URL"
        )


def _insert(connection: sa.Connection, table: sa.Table) -> postgresql.Insert:
    """INSERT … ON CONFLICT, which both databases spell the same and SQLAlchemy keeps per dialect."""
    if connection.dialect.name == "sqlite":
        return cast(postgresql.Insert, sqlite.insert(table))
    return postgresql.insert(table)


def _values(record: Record) -> dict[str, Any]:
    """Column values of a row: JSON values, but times as times."""
    return record.model_dump()


def _json(value: Any, *, where: str) -> str:
    try:
        return canonical_json(value)
    except (TypeError, ValueError) as error:
        raise CheckFailed(
            f"not storable as JSON: {error}",
            where=where,
            fix="leave undefined numbers out or give None; a NaN or an infinity is never stored",
        ) from error


def _plain(value: dict[str, Any], *, where: str) -> dict[str, Any]:
    """``value`` as it will be read back: plain JSON."""
    return cast(dict[str, Any], json.loads(_json(value, where=where)))
