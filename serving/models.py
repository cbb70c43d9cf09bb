"""What is served, under which name, and where it comes from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from infra.inference.engine import Engine
from infra.inference.renderers.base import Renderer
from infra.names import DOMAIN_NAME
from serving.errors import bad_request

_REF = re.compile(
    rf"(?P<domain>{DOMAIN_NAME.pattern})"
    r"(?:@(?P<stage>[a-z][a-z0-9_-]{0,31})|:(?P<version>[0-9]{1,9}))?"
)


@dataclass(frozen=True)
class ModelRef:
    """The ``model`` of a request: ``domain``, ``domain@stage`` or ``domain:version``.

    ``target`` is the stage or version as the registry writes it; empty means "what the domain serves now".
    """

    domain: str
    target: str = ""

    @classmethod
    def parse(cls, text: str) -> ModelRef:
        """Read the name; raises :class:`~serving.errors.ApiError` (400) on anything else."""
        match = _REF.fullmatch(text)
        if match is None:
            raise bad_request("'model' must be a domain, domain@stage or domain:version.", "model")
        version = match["version"]
        return cls(match["domain"], match["stage"] or (str(int(version)) if version else ""))


@dataclass(frozen=True)
class ServedModel:
    """A loaded model version."""

    domain: str
    version: int
    engine: Engine
    renderer: Renderer


class ModelSource(Protocol):
    """Where models come from. Its methods block; the gateway calls them outside of the event loop."""

    def domains(self) -> list[str]:
        """Names of all domains that have a model."""
        ...

    def resolve(self, domain: str, target: str) -> int | None:
        """Version behind a stage or version number; None when there is none."""
        ...

    def load(self, domain: str, version: int) -> ServedModel:
        """Load one version."""
        ...
