"""Prefect's settings, in place before Prefect is imported: quiet, offline, and everything below the home folder."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from infra.errors import CheckFailed

STARTUP_SECONDS = 120
"""A fresh embedded server creates its database first; on a busy machine that takes half a minute."""


def configure(root: Path) -> bool:
    """Set what the user has not set.

    Args:
        root: the home folder; Prefect's own home goes below it.

    Returns:
        Whether ``PREFECT_API_URL`` names a server; otherwise one is to be started for the run (:func:`embedded`).
    """
    served = bool(os.environ.get("PREFECT_API_URL"))
    defaults = _defaults(root)
    if not served:
        # An embedded server ends with the run, and log lines that come after it would only raise complaints.
        defaults["PREFECT_LOGGING_TO_API_ENABLED"] = "false"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    return served


def _defaults(root: Path) -> dict[str, str]:
    return {
        "DO_NOT_TRACK": "1",
        "PREFECT_HOME": str(root / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED": "false",
        # The console shows our own progress; Prefect's log goes to its server.
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    }


@contextlib.contextmanager
def embedded(root: Path) -> Iterator[None]:
    """A server of this process's own; ``PREFECT_API_URL`` names it inside the block. Errors as of :func:`server`."""
    with server(root) as url:
        os.environ["PREFECT_API_URL"] = url
        try:
            yield
        finally:
            del os.environ["PREFECT_API_URL"]


@contextlib.contextmanager
def server(root: Path) -> Iterator[str]:
    """Start a Prefect server on a free loopback port and yield the URL of its API.

    It has a session of its own, so that Ctrl-C in a terminal stops the run and not the server which the run still
    has to tell; it ends with the block, and with a killed process too.

    Raises:
        CheckFailed: the server does not come up.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = root / "prefect" / "server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "prefect",
        "server",
        "start",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--no-ui",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**_defaults(root), **os.environ},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    url = f"http://127.0.0.1:{port}/api"
    try:
        _wait_until_up(process, url, log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _end_with_parent() -> None:
    """Ask the kernel for SIGTERM when the parent dies (Linux, ``prctl(PR_SET_PDEATHSIG)``)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _wait_until_up(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + STARTUP_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=2).is_success:
                return
        time.sleep(0.2)
    problem = "ended" if process.poll() is not None else f"is not up after {STARTUP_SECONDS} s"
    raise CheckFailed(
        f"the embedded Prefect server {problem}",
        where=str(log),
        fix="read that log, or set PREFECT_API_URL to a server that runs",
    )
