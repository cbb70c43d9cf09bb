"""Fixtures that several rooms use."""

import signal

from tests.mlflow_store import mlflow_settings, mlflow_template
from tests.postgres import postgres_server, postgres_url

__all__ = ["mlflow_settings", "mlflow_template", "postgres_server", "postgres_url"]

# A shell that starts the tests in the background has them ignore Ctrl-C; the commands under test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
