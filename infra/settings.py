"""Where things live and how much of the machine to use; read from ``SENMON_*`` variables."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


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
