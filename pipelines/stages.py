"""The stages of a run: what each one needs, what it does, and the small result it leaves in the catalog.

A stage's result is a JSON mapping. Its ``content`` names what was made by hash, so that the next stage's inputs are
known without looking at files. A stage whose inputs did not change is not run again.
"""

from __future__ import annotations

import getpass
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.catalog import Catalog, RunRow
from infra.errors import CheckFailed, UsageError
from infra.hashing import content_hash
from infra.seeds import derive_seed
from infra.settings import Settings
from pipelines.gates import judge_gate
from pipelines.interruption import Interruption
from pipelines.promotion import Target, move, production_metrics
from pipelines.spec import SPEC_FILE, Domain

if TYPE_CHECKING:
    from data_contracts.contract import DataContract
    from data_contracts.drafts import Tables
    from data_contracts.records import Demonstration, Snapshot, Task
    from data_contracts.sources import Rows
    from domain_rewards.runtime import DomainRuntime
    from infra.registry import Registry
    from infra.tracking import TrackedRun
    from rl.evaluation import EvalReport

Output = dict[str, Any]
Results = Mapping[str, Output]


@dataclass
class RunContext:
    """Everything a stage may use; made once per process and run."""

    settings: Settings
    catalog: Catalog
    domain: Domain
    run: RunRow
    tracked: TrackedRun
    registry: Registry
    interruption: Interruption = field(default_factory=Interruption)

    @property
    def folder(self) -> Path:
        """The run's own folder."""
        return run_folder(self.settings, self.run)

    def seed(self, purpose: str) -> int:
        """The seed of one stage, derived from the run's seed."""
        return derive_seed(self.domain.spec.seed, purpose)

    def metrics(self, values: Mapping[str, float | None], step: int) -> None:
        """Logs a training step's figures; ``KeyboardInterrupt`` if the run was asked to stop."""
        self.interruption.check()
        self.tracked.metrics(values, step)

    @property
    def variables(self) -> dict[str, str]:
        """What ``${NAME}`` stands for in contracts and options; the process environment comes second."""
        return variables(self.settings)

    @cached_property
    def contract(self) -> DataContract:
        """The domain's data contract, checked against the ``data`` section."""
        from data_contracts.contract import DataContract

        contract = DataContract.load(self.domain.contract)
        self.domain.spec.data.check(contract)
        return contract

    @cached_property
    def runtime(self) -> DomainRuntime:
        """The domain's environment and verifiers."""
        return make_runtime(self.settings, self.domain)

    @cached_property
    def tables(self) -> dict[str, Rows]:
        """All rows of all tables, as the sources have them now."""
        from data_contracts.sources import read_table

        return {
            name: read_table(self.contract, name, self.domain.folder, self.variables) for name in self.contract.tables
        }

    def snapshot(self, results: Results) -> Snapshot:
        """The run's snapshot record."""
        from data_contracts.records import Snapshot

        return self.catalog.get(Snapshot, results["snapshot"]["snapshot"])

    def tasks(self, results: Results, split: str) -> list[Task]:
        """The tasks of one split of the run's snapshot."""
        from data_contracts.snapshot import load_tasks

        return load_tasks(Path(results["snapshot"]["folder"]), self.snapshot(results), split)

    def demonstrations(self, results: Results, split: str) -> list[Demonstration]:
        """The demonstrations of one split of the run's snapshot."""
        from data_contracts.snapshot import load_demonstrations

        return load_demonstrations(Path(results["snapshot"]["folder"]), self.snapshot(results), split)

    def policy(self, results: Results, stage: str) -> Path:
        """The policy a stage made, if it is still what it was.

        Raises:
            CheckFailed: its files are gone or were changed.
        """
        from infra.compute.policy import policy_hash

        folder = Path(results[stage]["policy"])
        if not folder.is_dir() or policy_hash(folder) != results[stage]["content"]:
            raise CheckFailed(
                f"the policy of stage {stage} is gone or was changed",
                where=str(folder),
                fix=f"start a new run: senmon run {self.domain.argument}",
            )
        return folder


@dataclass(frozen=True)
class Stage:
    """One step of a run.

    ``needs`` are the stages whose results it reads; ``spec`` the sections of the configuration it depends on.
    """

    name: str
    needs: tuple[str, ...]
    spec: tuple[str, ...]
    execute: Callable[[RunContext, Results], Output]
    tidy: Callable[[RunContext], None] | None = None
    """Removes what only a resume would need; called once the result is recorded."""

    def inputs_hash(self, domain: Domain, results: Results) -> str:
        """Content hash of everything that decides this stage's result."""
        payload = domain.spec.payload()
        return content_hash(
            {
                "stage": self.name,
                "spec": {key: payload[key] for key in self.spec},
                "code": domain.code,
                "upstream": {name: results[name]["content"] for name in self.needs},
                "seed": domain.spec.seed,
            }
        )


def run_folder(settings: Settings, run: RunRow) -> Path:
    """Where a run keeps its files."""
    return settings.root / "runs" / run.run_id


def variables(settings: Settings) -> dict[str, str]:
    """Senmon's own variables for contracts and options."""
    return {"SENMON_HOME": str(settings.root)}


def expand(value: Any, variables: Mapping[str, str], where: str) -> Any:
    """Replace ``${NAME}`` in every string of a JSON value; :class:`UsageError` when NAME is not set."""
    from data_contracts.sources import expand as expand_text

    if isinstance(value, Mapping):
        return {key: expand(each, variables, where) for key, each in value.items()}
    if isinstance(value, list):
        return [expand(each, variables, where) for each in value]
    return expand_text(value, variables, where) if isinstance(value, str) else value


def make_runtime(settings: Settings, domain: Domain) -> DomainRuntime:
    """A domain's environment and verifiers, the options' variables expanded."""
    from domain_rewards.runtime import load_runtime

    environment = domain.spec.environment
    options = expand(environment.options, variables(settings), f"{domain.folder / SPEC_FILE}, environment.options")
    return load_runtime(environment.class_, options, domain.spec.verifiers, domain.folder)


def prepare_data(context: RunContext) -> None:
    """Make the domain's sample data, if the domain has code for it (which does nothing the second time)."""
    from domain_rewards.plugins import resolve

    if context.domain.spec.prepare is not None:
        context.settings.root.mkdir(parents=True, exist_ok=True)
        resolve(context.domain.spec.prepare, context.domain.folder)(context.settings.root)


def validate_stage(context: RunContext, results: Results) -> Output:
    """Prepare the data, read it, and hold it against the contract."""
    from data_contracts.validation import validate

    prepare_data(context)
    docs = context.folder / "data_docs"
    report = validate(context.contract, context.tables, docs)
    if docs.is_dir():
        context.tracked.artifacts(docs, "data_docs")
    context.catalog.put(report)
    report.raise_on_failure()
    return {"content": data_hash(context.tables), "report": report.id, "rows": report.rows, "docs": str(docs)}


def snapshot_stage(context: RunContext, results: Results) -> Output:
    """Freeze the validated data as Parquet, split into train, dev and test."""
    from data_contracts.report import ValidationReport
    from data_contracts.snapshot import build_snapshot

    if data_hash(context.tables) != results["validate"]["content"]:
        raise CheckFailed(
            "the data changed after it was validated",
            where=f"run {context.run.run_id}",
            fix=f"start a new run, which validates what is there now: senmon run {context.domain.argument}",
        )
    report = context.catalog.get(ValidationReport, results["validate"]["report"])
    folder = context.folder / "snapshot"
    snapshot = build_snapshot(
        context.domain.name, context.contract, context.domain.spec.data, context.tables, report, folder
    )
    identity = context.catalog.put(snapshot)
    rows = {name: file.rows for name, file in snapshot.files.items()}
    return {"content": identity, "snapshot": identity, "folder": str(folder), "rows": rows}


def discard_checkpoints(stage: str) -> Callable[[RunContext], None]:
    """What :attr:`Stage.tidy` does for a training stage."""

    def tidy(context: RunContext) -> None:
        from sft.stage import discard_checkpoints as discard

        discard(context.folder / stage)

    return tidy


def sft_stage(context: RunContext, results: Results) -> Output:
    """Cold start on demonstrations."""
    from infra.compute.policy import policy_hash
    from sft.stage import run_sft

    spec, out = context.domain.spec, context.folder / "sft"
    demonstrations = context.demonstrations(results, "train")
    if not demonstrations:
        raise CheckFailed(
            "there is no demonstration of a training task, so nothing to cold-start from",
            where=f"{context.domain.folder / 'domain.yaml'}, data.demonstrations",
            fix="add demonstrations to the data",
        )
    result = run_sft(
        spec.model,
        spec.sft,
        context.tasks(results, "train") + context.tasks(results, "dev"),
        demonstrations,
        context.demonstrations(results, "dev"),
        context.runtime,
        out,
        context.seed("sft"),
        context.metrics,
    )
    return {"content": policy_hash(result.policy), "policy": str(result.policy), "metrics": result.metrics}


def cold_start_gate_stage(context: RunContext, results: Results) -> Output:
    """Is the cold start good enough for reinforcement learning to find reward?"""
    report = _evaluate(context, results, "sft", "dev", reference=None)
    metrics = {**results["sft"]["metrics"], "sft.dev_success": report.success}
    gate = judge_gate("cold_start", context.domain.spec.gates.cold_start, metrics, evaluated=_judged(report))
    context.catalog.put(gate)
    gate.raise_on_failure()
    return {"content": gate.id, "metrics": metrics, "gate": gate.payload()}


def rl_stage(context: RunContext, results: Results) -> Output:
    """Reinforcement learning on the verifiers' rewards."""
    from infra.compute.policy import policy_hash
    from rl.stage import run_rl

    out = context.folder / "rl"
    result = run_rl(
        context.policy(results, "sft"),
        context.domain.spec.rl,
        context.tasks(results, "train"),
        context.tasks(results, "dev"),
        context.runtime,
        out,
        context.seed("rl"),
        context.metrics,
    )
    return {"content": policy_hash(result.policy), "policy": str(result.policy), "metrics": result.metrics}


def evaluate_stage(context: RunContext, results: Results) -> Output:
    """Both policies on the test split, which no choice was made on."""
    before = _evaluate(context, results, "sft", "test", reference=None)
    after = _evaluate(context, results, "rl", "test", reference=context.policy(results, "sft"))
    for report in (before, after):
        context.catalog.put(report)
    metrics = {
        "sft.heldout_success": before.success,
        "sft.heldout_success_sampled": before.success_sampled,
        "sft.thinking_token_ratio": before.thinking_token_ratio,
        "rl.heldout_success": after.success,
        "rl.heldout_success_sampled": after.success_sampled,
        "thinking_token_ratio": after.thinking_token_ratio,
        "mean_tokens": after.mean_tokens,
        "mean_seconds": after.mean_seconds,
        "kl_to_reference": after.kl_to_reference,
    }
    context.tracked.metrics(metrics, 0)
    return {
        "content": content_hash([_timeless(before), _timeless(after)]),
        "metrics": metrics,
        "evaluated": _judged(after),
        "reports": {"sft": before.payload(), "rl": after.payload()},
    }


def promotion_gate_stage(context: RunContext, results: Results) -> Output:
    """Is the trained policy good enough for the registry?"""
    metrics = {**results["sft_gate"]["metrics"], **results["rl"]["metrics"], **results["evaluate"]["metrics"]}
    gate = judge_gate(
        "promotion",
        context.domain.spec.gates.promotion,
        metrics,
        evaluated=results["evaluate"]["evaluated"],
        production=production_metrics(context.registry, context.catalog, context.domain.name),
    )
    context.catalog.put(gate)
    gate.raise_on_failure()
    evaluated = results["evaluate"]["evaluated"]
    return {"content": gate.id, "metrics": metrics, "evaluated": evaluated, "gate": gate.payload()}


def register_stage(context: RunContext, results: Results) -> Output:
    """Give the policy a version number and put it into staging."""
    policy = context.policy(results, "rl")
    version = context.registry.register(
        context.domain.name,
        policy,
        key=f"{context.run.run_id}:{results['rl']['content']}",
        tags={
            "run_id": context.run.run_id,
            "snapshot": results["snapshot"]["snapshot"],
            "spec": context.domain.spec_hash,
        },
        run_id=context.tracked.run_id,
    )
    _move(context, results, version.version, "staging")
    return {"content": content_hash([version.domain, version.version]), "version": version.version, "stage": "staging"}


def promote_stage(context: RunContext, results: Results) -> Output:
    """Put the new version into production."""
    version = results["register"]["version"]
    _move(context, results, version, "production")
    return {"content": content_hash([version, "production"]), "version": version, "stage": "production"}


STAGES: tuple[Stage, ...] = (
    Stage("validate", (), ("contract", "prepare", "data"), validate_stage),
    Stage("snapshot", ("validate",), ("data",), snapshot_stage),
    Stage("sft", ("snapshot",), ("model", "sft", "environment", "verifiers"), sft_stage, discard_checkpoints("sft")),
    Stage("sft_gate", ("snapshot", "sft"), ("gates", "evaluation", "environment", "verifiers"), cold_start_gate_stage),
    Stage(
        "rl", ("snapshot", "sft", "sft_gate"), ("rl", "environment", "verifiers"), rl_stage, discard_checkpoints("rl")
    ),
    Stage("evaluate", ("snapshot", "sft", "rl"), ("evaluation", "environment", "verifiers"), evaluate_stage),
    Stage("gate", ("sft_gate", "rl", "evaluate"), ("gates",), promotion_gate_stage),
    Stage("register", ("snapshot", "rl", "gate"), (), register_stage),
    Stage("promote", ("gate", "register"), (), promote_stage),
)


def select_stages(selection: str | None, promote: bool) -> tuple[Stage, ...]:
    """The stages of ``a..b`` (either end may be left out; ``a`` alone is one stage), in order.

    ``promote`` adds the move into production at the end, where the selection reaches that far.

    Raises:
        UsageError: an unknown stage, or the first after the last.
    """
    available = STAGES if promote else STAGES[:-1]
    if selection is None:
        return available
    names = [stage.name for stage in STAGES]
    first, dots, last = selection.partition("..")
    first, last = first.strip() or names[0], (last.strip() or available[-1].name) if dots else first.strip()
    for name in (first, last):
        if name not in names:
            from infra.yaml_file import did_you_mean

            raise UsageError(
                f"unknown stage {name!r}{did_you_mean(name, names)}",
                where=f"--stages {selection}",
                fix=f"stages, in order: {', '.join(names)}",
            )
    if names.index(first) > names.index(last):
        raise UsageError(
            f"{first} comes after {last}", where=f"--stages {selection}", fix=f"stages, in order: {', '.join(names)}"
        )
    return STAGES[names.index(first) : names.index(last) + 1]


def data_hash(tables: Tables) -> str:
    """Content hash of all rows in any order; values that JSON does not know (dates, decimals) count by their text."""
    digest = hashlib.sha256()
    for name in sorted(tables):
        digest.update(json.dumps([name, len(tables[name])]).encode())
        lines = (json.dumps(row, sort_keys=True, default=repr) for row in tables[name])
        for line in sorted(hashlib.sha256(line.encode()).digest() for line in lines):
            digest.update(line)
    return digest.hexdigest()


def _evaluate(context: RunContext, results: Results, stage: str, split: str, reference: Path | None) -> EvalReport:
    from rl.evaluation import evaluate_policy

    tasks = context.tasks(results, split)
    policy = context.policy(results, stage)
    report = evaluate_policy(
        policy, tasks, context.runtime, context.domain.spec.evaluation, context.seed(f"evaluate {split}"), reference
    )
    allowed = context.domain.spec.evaluation.max_unjudged
    if report.unjudged > allowed * report.episodes:
        reasons = "".join(f"\n    {count} x {reason}" for reason, count in report.unjudged_reasons.items())
        raise CheckFailed(
            f"{report.unjudged} of {report.episodes} episodes of the {split} split could not be judged, "
            f"allowed {allowed:.0%}:{reasons}",
            where=f"evaluation of policy {stage}",
            fix="repair the verifier or the environment; nothing was counted as a failure of the model",
        )
    return report


def _timeless(report: EvalReport) -> dict[str, Any]:
    """A report without what differs between two equal runs: the time they took."""
    return {name: value for name, value in report.payload().items() if name != "mean_seconds"}


def _judged(report: EvalReport) -> int:
    return report.episodes - report.unjudged


def _move(context: RunContext, results: Results, version: int, to: Target) -> None:
    move(
        context.registry,
        context.catalog,
        context.domain.name,
        version,
        to,
        who=getpass.getuser(),
        why=f"run {context.run.run_id}",
        gate=results["gate"]["gate"],
        key=f"{context.run.run_id}:{results['rl']['content'] if 'rl' in results else version}:{to}",
    )
