"""A domain made runnable: its environment class, options and verifiers, loaded and checked once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_contracts.records import Task
from domain_rewards.environments.base import ToolEnvironment, ToolFailure
from domain_rewards.episode import Episode
from domain_rewards.plugins import ENVIRONMENTS, VERIFIERS, resolve
from domain_rewards.verifiers.base import Verifier
from domain_rewards.verifiers.judge import Verdict, judge, unjudged
from infra.errors import UsageError


@dataclass(frozen=True)
class DomainRuntime:
    """What rollouts and evaluations need of a domain."""

    environment: type[ToolEnvironment]
    options: Mapping[str, Any]
    verifiers: tuple[Verifier, ...]
    base: Path | None
    judge_timeout_s: float = 30.0

    async def open(self, task: Task) -> ToolEnvironment:
        """A fresh environment for one episode, set up.

        Raises:
            ToolFailure: it could not be made or set up; the episode has no turns and no reward
                (:meth:`unjudged`).
        """
        try:
            environment = self.environment(task, self.options)
            await environment.setup()
        except ToolFailure:
            raise
        except (Exception, SystemExit) as error:
            raise ToolFailure(
                f"the environment could not be set up: {type(error).__name__}: {error}",
                where=f"task {task.task_id}, {self.environment.__name__}",
                fix="repair what the environment depends on (environment.options in domain.yaml)",
            ) from error
        return environment

    async def judge(self, episode: Episode) -> Verdict:
        """The verdict of all verifiers."""
        return await judge(episode, self.verifiers, self.judge_timeout_s)

    def unjudged(self, failure: ToolFailure) -> Verdict:
        """The verdict of an episode whose environment failed: no reward, and why."""
        return unjudged(self.verifiers, failure.what)


def load_runtime(
    environment_ref: str, options: Mapping[str, Any], verifier_refs: Sequence[str], base: Path | None
) -> DomainRuntime:
    """Load a domain's environment and verifiers.

    Args:
        environment_ref: the environment's class, see :func:`~domain_rewards.plugins.resolve`.
        verifier_refs: the verifiers, likewise.
        options: handed to every environment as they are; variables in them are already expanded.
        base: the domain's folder.

    Raises:
        UsageError: something is not there or is not what it should be; no verifier; two of one name; a tool whose
            parameters have no schema; options that the environment refuses.
    """
    environment = resolve(environment_ref, base, ENVIRONMENTS)
    if not (isinstance(environment, type) and issubclass(environment, ToolEnvironment)):
        raise UsageError(
            f"{environment_ref} is not an environment class",
            where="domain.yaml, environment.class",
            fix="derive it from domain_rewards.environments.base.ToolEnvironment",
        )
    environment.tools()
    environment.check_options(options)
    return DomainRuntime(environment, dict(options), _load_verifiers(verifier_refs, base), base)


def _load_verifiers(references: Sequence[str], base: Path | None) -> tuple[Verifier, ...]:
    where = "domain.yaml, verifiers"
    verifiers: list[Verifier] = []
    for reference in references:
        loaded = resolve(reference, base, VERIFIERS)
        if not isinstance(loaded, Verifier):
            raise UsageError(
                f"{reference} is not a verifier", where=where, fix="decorate the function with @verifier(name)"
            )
        if any(loaded.name == other.name for other in verifiers):
            raise UsageError(f"two verifiers are named {loaded.name!r}", where=where, fix="rename one of them")
        verifiers.append(loaded)
    if not verifiers:
        raise UsageError("a domain needs at least one verifier", where=where, fix="add one to the list")
    return tuple(verifiers)
