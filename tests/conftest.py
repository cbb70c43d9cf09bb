"""Fixtures that several rooms use."""

from tests.mlflow_store import mlflow_settings, mlflow_template
from tests.postgres import postgres_server, postgres_url

__all__ = ["mlflow_settings", "mlflow_template", "postgres_server", "postgres_url"]
