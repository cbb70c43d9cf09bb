"""Models from the MLflow registry, on the embedded engine."""

from __future__ import annotations

from infra.compute.policy import load_policy
from infra.compute.threads import configure_threads
from infra.errors import UsageError
from infra.registry import Registry, VersionNotFound
from infra.settings import Settings
from serving.models import ServedModel


class RegistrySource:
    """Implements :class:`~serving.models.ModelSource`.

    Raises:
        UsageError, CheckFailed: the registry cannot be opened.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._registry = Registry(settings)

    def domains(self) -> list[str]:
        """All domains with a registered model."""
        return list(self._registry.domains())

    def resolve(self, domain: str, target: str) -> int | None:
        """Version behind a stage or version number; None when there is none or no such stage."""
        try:
            return self._registry.resolve(domain, target).version
        except (VersionNotFound, UsageError):
            return None

    def load(self, domain: str, version: int) -> ServedModel:
        """Download one version (its hash is checked) and put an engine on it."""
        folder = self._registry.download(self._registry.resolve(domain, str(version)))
        configure_threads(self._settings)
        policy = load_policy(folder)
        return ServedModel(domain, version, policy.engine(), policy.renderer)
