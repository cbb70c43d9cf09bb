"""Prefect's settings, in place before Prefect is imported: quiet, offline, and everything below the home folder."""

from __future__ import annotations

import os
from pathlib import Path

STARTUP_SECONDS = 120
"""A fresh embedded server creates its database first; on a busy machine that takes half a minute."""


def configure(root: Path) -> bool:
    """Set what the user has not set.

    Args:
        root: the home folder; Prefect's own home goes below it.

    Returns:
        Whether ``PREFECT_API_URL`` names a server; otherwise one is started for the run and ends with it.
    """
    defaults = {
        "DO_NOT_TRACK": "1",
        "PREFECT_HOME": str(root / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": str(STARTUP_SECONDS),
        # The console shows our own progress; Prefect's log goes to its server.
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    }
    served = bool(os.environ.get("PREFECT_API_URL"))
    if not served:
        # An embedded server ends with the run, and log lines that come after it would only raise complaints.
        defaults["PREFECT_LOGGING_TO_API_ENABLED"] = "false"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    return served
