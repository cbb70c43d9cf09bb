"""Where things live and how much of the machine to use; read from ``SENMON_*`` variables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from infra.errors import UsageError

_NOT_IN_URLS = re.compile(r"\?|%[0-9A-Fa-f]{2}")
"""What a database URL takes for the beginning of its query, or for one encoded character."""


class Settings(BaseSettings):
    """Deployment settings. A laptop needs none of them; a team sets the URLs.

    Everything embedded lives below ``home``: catalog, MLflow store, policies, locks.
    """

    model_config = SettingsConfigDict(env_prefix="SENMON_", frozen=True)

    home: Path = Path(".senmon")
    catalog_url: str = ""
    """SQLAlchemy URL of the catalog; empty = SQLite below ``home``."""
    tracking_uri: str = ""
    """MLflow tracking and registry URI; empty = SQLite below ``home``."""
    threads: int = Field(default=1, ge=0)
    """CPU threads for torch; 0 = all physical cores that this process may use. One suits the ``tiny-moe`` preset,
    whose products are too small to share; a model of hundreds of millions of parameters wants 0."""

    @model_validator(mode="after")
    def _home_fits_into_urls(self) -> Self:
        """Refuse a home whose databases would be put elsewhere.

        Contracts and options write ``sqlite:///${SENMON_HOME}/…`` as well, so encoding our own URLs would not do.
        """
        found = _NOT_IN_URLS.search(str(self.root))
        if found is not None:
            raise UsageError(
                f"the home folder's path holds {found[0]!r}, which means something else in a database URL",
                where=f"SENMON_HOME, {self.root}",
                fix="set SENMON_HOME to a folder without '?' and '%' in its path",
            )
        return self

    @property
    def root(self) -> Path:
        """``home`` as an absolute path (created on first use by whoever writes there)."""
        return self.home.expanduser().resolve()

    @property
    def catalog(self) -> str:
        """SQLAlchemy URL of the catalog."""
        return self.catalog_url or f"sqlite:///{self.root / 'catalog.db'}"

    @property
    def tracking(self) -> str:
        """MLflow tracking URI."""
        return self.tracking_uri or f"sqlite:///{self.root / 'mlflow.db'}"
