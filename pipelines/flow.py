"""The pipeline as a Prefect flow with one task per stage.

Prefect shows and schedules; what is finished is decided by the catalog, which survives any process. Import this module
only after :func:`pipelines.prefect_env.configure`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from prefect import Flow, flow, task
from prefect.cache_policies import NO_CACHE

from infra.errors import SenmonError, UsageError
from infra.telemetry import logger
from pipelines.stages import STAGES, Output, RunContext, Stage


class StageFailed(Exception):
    """Says in which stage a run ended; the cause is chained."""

    def __init__(self, stage: str, cause: BaseException) -> None:
        super().__init__(f"stage {stage}: {cause}")
        self.stage = stage
        self.cause = cause


def build_flow(context: RunContext, stages: Sequence[Stage]) -> Flow[[str, str], dict[str, Output]]:
    """The flow of one run.

    Args:
        context: the run.
        stages: what to run, in order; results of earlier stages are taken from the catalog.
    """

    @flow(
        name=f"senmon-{context.domain.name}",
        flow_run_name=context.run.run_id,
        retries=0,
        persist_result=False,
        validate_parameters=False,
    )
    def pipeline(domain: str, run_id: str) -> dict[str, Output]:
        results = earlier_results(context, stages[0])
        # Again: Prefect has put its own SIGTERM handler in place since.
        with context.interruption.armed():
            for stage in stages:
                run_task = task(name=stage.name, cache_policy=NO_CACHE, persist_result=False, retries=0)(run_stage)
                results[stage.name] = run_task(context, stage, results)
        return results

    return pipeline


def run_stage(context: RunContext, stage: Stage, results: dict[str, Output]) -> Output:
    """Run a stage, or return what it left in the catalog if nothing it depends on has changed.

    Raises:
        StageFailed: carries the stage's name and the cause.
        KeyboardInterrupt: the run was asked to stop, before the stage or during it; its result is not recorded.
    """
    context.interruption.check()
    inputs_hash = stage.inputs_hash(context.domain, results)
    row = context.catalog.stage_result(context.run.run_id, stage.name)
    if row is not None and row.inputs_hash == inputs_hash:
        logger.info("%-9s kept", stage.name)
        output = row.output
    else:
        logger.info("%-9s …", stage.name)
        began = time.monotonic()
        try:
            output = stage.execute(context, results)
        except (Exception, SystemExit) as error:  # a domain's code that exits has failed, too
            raise StageFailed(stage.name, error) from error
        # A dropped interrupt may have left anything half done, so what was made is not trusted.
        context.interruption.check()
        seconds = time.monotonic() - began
        output = context.catalog.save_stage(context.run.run_id, stage.name, inputs_hash, output, seconds).output
        logger.info("%-9s done in %.1f s", stage.name, seconds)
    if stage.tidy is not None:
        stage.tidy(context)
    return output


def earlier_results(context: RunContext, first: Stage) -> dict[str, Output]:
    """Results of the stages before ``first``, which must all be there and still fit.

    Raises:
        UsageError: one is missing, or was made from other inputs.
    """
    results: dict[str, Output] = {}
    for stage in STAGES[: STAGES.index(first)]:
        row = context.catalog.stage_result(context.run.run_id, stage.name)
        if row is None or row.inputs_hash != stage.inputs_hash(context.domain, results):
            problem = "was not run yet" if row is None else "was made from other inputs"
            raise UsageError(
                f"stage {first.name} needs stage {stage.name}, which {problem} in this run",
                where=f"run {context.run.run_id}",
                fix=f"senmon run {context.domain.argument} --resume --stages {stage.name}..{first.name}",
            )
        results[stage.name] = row.output
    return results


def root_cause(error: BaseException) -> tuple[str | None, BaseException]:
    """The stage in which an error happened (if in one), and the error itself."""
    if isinstance(error, StageFailed):
        return error.stage, error.cause
    return None, error


def explain(error: BaseException) -> str:
    """An error in the words for the run's summary."""
    return str(error) if isinstance(error, SenmonError) else f"{type(error).__name__}: {error}"
