"""``senmon run``: one run of a domain's pipeline, from the request to the summary."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.catalog import Catalog, RunRow, RunStatus
from infra.errors import CheckFailed, SenmonError, UsageError
from infra.locks import HeldLock, domain_lock
from infra.settings import Settings
from infra.telemetry import logger
from pipelines import prefect_env
from pipelines.disk import disk_full
from pipelines.gates import GateRejected
from pipelines.interruption import Interruption
from pipelines.spec import Domain, changes, load_domain
from pipelines.stages import Output, RunContext, Stage, make_runtime, run_folder, select_stages

TRACKING = "tracking"
"""Pseudo stage in the catalog that remembers the run's MLflow id."""


@dataclass(frozen=True)
class RunRequest:
    """What the user asked for."""

    domain: str
    stages: str | None = None
    resume: bool = False
    promote: bool = False
    overrides: tuple[str, ...] = ()
    seed: int | None = None

    @property
    def settings_of_spec(self) -> tuple[str, ...]:
        """All overrides; ``seed`` is one of them."""
        return self.overrides if self.seed is None else (*self.overrides, f"seed={self.seed}")


class Interrupted(Exception):
    """Ctrl-C or SIGTERM ended the run cleanly; it can be resumed."""

    def __init__(self, domain: str, run_id: str) -> None:
        super().__init__(f"run {run_id} interrupted")
        self.domain = domain
        self.run_id = run_id


def run_domain(settings: Settings, request: RunRequest) -> dict[str, Any]:
    """Run the pipeline and return the run's summary.

    Raises:
        UsageError: bad input; nothing was started.
        CheckFailed: the contract, a gate or a guard said no, or the domain is busy.
        Interrupted: the user stopped it.
        KeyboardInterrupt: the user stopped it before there was a run.
    """
    interruption = Interruption()
    with interruption.armed():
        return _run_domain(settings, request, interruption)


def _run_domain(settings: Settings, request: RunRequest, interruption: Interruption) -> dict[str, Any]:
    domain = load_domain(request.domain, request.settings_of_spec)
    select_stages(request.stages, request.promote)
    preflight(settings, domain)
    with Catalog.open(settings.catalog) as catalog, domain_lock(settings, domain.name) as lock:
        domain, run = _resume(catalog, domain, request) if request.resume else _start(catalog, domain, request)
        lock.set_run(run.run_id)
        promote = run.params["promote"] or request.promote
        stages = select_stages(request.stages or run.params["stages"], promote)
        if request.stages is None and all(catalog.stage_result(run.run_id, stage.name) for stage in stages):
            stages = select_stages(None, promote)  # what was asked of the run is done: resuming it goes on to the end
        return _Run(settings, catalog, domain, run, stages, lock, interruption).execute()


def preflight(settings: Settings, domain: Domain) -> None:
    """Everything that is wrong with a domain's own files, found before anything is started.

    Raises:
        UsageError: the contract is broken or lacks what ``data`` names; environment or verifiers cannot be loaded.
    """
    from data_contracts.contract import DataContract

    path = domain.spec.model.path
    if path is not None and path.startswith(("/", ".", "~")) and not (Path(path) / "config.json").is_file():
        raise UsageError(
            f"there is no model in {path}",
            where=f"{domain.folder / 'domain.yaml'}, model.path",
            fix="give a folder with config.json, weights and tokenizer, or a hub id",
        )
    domain.spec.data.check(DataContract.load(domain.contract))
    make_runtime(settings, domain)


def _start(catalog: Catalog, domain: Domain, request: RunRequest) -> tuple[Domain, RunRow]:
    stages = select_stages(request.stages, request.promote)
    if stages[0].needs:
        raise UsageError(
            f"a new run begins with stage validate, not {stages[0].name}",
            where=f"--stages {request.stages}",
            fix=f"continue a run: senmon run {domain.argument} --resume --stages {request.stages}",
        )
    unfinished = catalog.latest_unfinished(domain.name)
    if unfinished is not None:
        logger.info("run %s of %s did not finish; --resume would have continued it", unfinished.run_id, domain.name)
    params = {
        "spec": domain.spec.payload(),
        "code": domain.code,
        "overrides": list(request.settings_of_spec),
        "promote": request.promote,
        "stages": request.stages,
    }
    return domain, catalog.start_run(domain.name, domain.spec_hash, params)


def _resume(catalog: Catalog, domain: Domain, request: RunRequest) -> tuple[Domain, RunRow]:
    """The unfinished run and the configuration it began with.

    Raises:
        UsageError: nothing to resume, or the domain changed since.
    """
    run = catalog.latest_unfinished(domain.name)
    if run is None:
        raise UsageError(
            f"{domain.name} has no unfinished run to resume",
            where=f"catalog, domain {domain.name}",
            fix=f"start one: senmon run {domain.argument}",
        )
    if not request.settings_of_spec:
        domain = load_domain(request.domain, tuple(run.params["overrides"]))
    if domain.spec_hash != run.spec_hash:
        keys = changes(run.params["spec"], domain.spec.payload()) + changes(run.params["code"], domain.code)
        raise UsageError(
            f"{domain.name} changed since run {run.run_id} began: {', '.join(keys[:10])}",
            where=str(domain.folder),
            fix=f"undo the change to resume, or start a new run: senmon run {domain.argument}",
        )
    logger.info("resuming run %s", run.run_id)
    return domain, catalog.reopen_run(run.run_id)


@dataclass(frozen=True)
class _Run:
    settings: Settings
    catalog: Catalog
    domain: Domain
    run: RunRow
    stages: Sequence[Stage]
    lock: HeldLock
    interruption: Interruption

    def execute(self) -> dict[str, Any]:
        """Run the stages and record how it ended."""
        began = time.monotonic()
        before = sum(row.seconds or 0.0 for row in self.catalog.stages(self.run.run_id))
        try:
            results = self._stages()
        except KeyboardInterrupt:
            raise self._interrupted() from None
        except Exception as error:
            if self.interruption.requested:  # somebody caught the interrupt and raised this instead
                raise self._interrupted() from error
            raise self._failed(error) from error
        seconds = before + time.monotonic() - began
        made = summarise(self.domain.name, self.run.run_id, results, seconds)
        complete = "register" in results
        self.catalog.finish_run(self.run.run_id, "succeeded" if complete else "partial", made)
        return made

    def _stages(self) -> dict[str, Output]:
        served = prefect_env.configure(self.settings.root)
        logger.info("run %s of %s%s", self.run.run_id, self.domain.name, "" if served else ", starting Prefect")
        if served:
            return self._flow()
        with prefect_env.embedded(self.settings.root):
            return self._flow()

    def _flow(self) -> dict[str, Output]:
        from infra.compute.threads import configure_threads
        from infra.registry import Registry
        from infra.tracking import Tracker
        from pipelines.flow import build_flow

        configure_threads(self.settings)
        name = self.run.run_id
        tracker = Tracker(self.settings)
        known = self.catalog.stage_result(name, TRACKING)
        tags = {"senmon.run": name, "senmon.spec_hash": self.domain.spec_hash}
        mlflow_id = tracker.find(self.domain.name, name) if known is None else known.output["run_id"]
        with tracker.run(self.domain.name, name, self.domain.spec.payload(), tags, run_id=mlflow_id) as tracked:
            self.catalog.save_stage(name, TRACKING, "", {"run_id": tracked.run_id})
            registry = Registry(self.settings)
            context = RunContext(
                self.settings, self.catalog, self.domain, self.run, tracked, registry, self.interruption
            )
            context.folder.mkdir(parents=True, exist_ok=True)
            self.lock.check()
            return build_flow(context, self.stages)(self.domain.name, name)

    def _interrupted(self) -> Interrupted:
        self._record("interrupted", {})
        return Interrupted(self.domain.name, self.run.run_id)

    def _failed(self, error: Exception) -> SenmonError:
        """Record the failure; what is not one of ours leaves its traceback in the run's folder."""
        from pipelines.flow import explain, root_cause

        stage, cause = root_cause(error)
        resume = f"senmon run {self.domain.argument} --resume"
        shown = disk_full(cause, run_folder(self.settings, self.run), resume)
        summary = {
            "domain": self.domain.name,
            "run_id": self.run.run_id,
            "stage": stage,
            "error": explain(shown or cause),
        }
        self._record("rejected" if isinstance(cause, GateRejected) else "failed", summary)
        if shown is not None:
            return shown
        if isinstance(cause, SenmonError):
            return cause
        log = self._traceback(error)
        return CheckFailed(
            f"{type(cause).__name__}: {cause}" + (f" in stage {stage}" if stage else ""),
            where=f"run {self.run.run_id}, full traceback in {log}",
            fix=f"once the cause is gone: {resume}",
        )

    def _record(self, status: RunStatus, summary: dict[str, Any]) -> None:
        """How the run ended, never hiding why: left unrecorded it stays ``running``, which can be resumed as well."""
        try:
            self.catalog.finish_run(self.run.run_id, status, summary)
        except SenmonError as problem:
            logger.warning("that the run ended as %s could not be recorded: %s", status, problem.what)

    def _traceback(self, error: Exception) -> Path:
        log = run_folder(self.settings, self.run) / "error.txt"
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text("".join(traceback.format_exception(error)))
        except OSError as problem:
            logger.warning("the traceback could not be kept: %s", problem)
        return log


def summarise(domain: str, run_id: str, results: Mapping[str, Output], seconds: float) -> dict[str, Any]:
    """The run's main figures; what was not reached, or is not defined, is None."""
    metrics = results["evaluate"]["metrics"] if "evaluate" in results else {}
    last = results.get("promote") or results.get("register") or {}
    return {
        "domain": domain,
        "run_id": run_id,
        "snapshot": results["snapshot"]["snapshot"] if "snapshot" in results else None,
        "sft.heldout_success": metrics.get("sft.heldout_success"),
        "rl.heldout_success": metrics.get("rl.heldout_success"),
        "rl.heldout_success_sampled": metrics.get("rl.heldout_success_sampled"),
        "thinking_token_ratio": metrics.get("thinking_token_ratio"),
        "kl_to_reference": metrics.get("kl_to_reference"),
        "registry.version": last.get("version"),
        "registry.stage": last.get("stage"),
        "seconds": round(seconds, 1),
    }
