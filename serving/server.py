"""``senmon serve``: the gateway on a socket."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import socket
from collections.abc import Callable, Sequence

import uvicorn

from infra.errors import UsageError
from infra.settings import Settings
from serving.app import create_app
from serving.models import ModelSource
from serving.options import GatewayOptions
from serving.registry_source import RegistrySource

logger = logging.getLogger(__name__)

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")


def serve(
    settings: Settings,
    domains: Sequence[str] | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    stage: str = "production",
    options: GatewayOptions | None = None,
    *,
    source: ModelSource | None = None,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until Ctrl-C or SIGTERM; open requests then get ``options.drain_s`` seconds to finish.

    Args:
        settings: where the registry and the models are.
        domains: the domains to serve; None serves all that are registered.
        host: address to bind. There are no API keys: anything but loopback is open to that network.
        port: 0 takes a free one.
        stage: the stage served by default; ``production`` falls back to ``staging``.
        options: limits and intervals.
        source: models from elsewhere than the registry.
        ready: called with the base URL when the socket is bound, before models are loaded.

    Raises:
        UsageError: the address cannot be bound. Nothing has been loaded by then.
    """
    chosen = options or GatewayOptions()
    with contextlib.closing(bind(host, port)) as listener:
        url = base_url(listener)
        loopback = ipaddress.ip_address(listener.getsockname()[0]).is_loopback
        if not loopback:
            logger.warning("%s is not loopback and there are no API keys: whoever reaches it can use it", url)
        app = create_app(
            source or RegistrySource(settings),
            domains=domains,
            stages=("production", "staging") if stage == "production" else (stage,),
            options=chosen,
            allowed_hosts=LOOPBACK_NAMES if loopback else None,
        )
        if ready is not None:
            ready(url)
        # The gateway logs each turn itself, without paths and queries of the caller's making.
        config = uvicorn.Config(
            app,
            access_log=False,
            log_config=None,
            timeout_graceful_shutdown=int(chosen.drain_s) + 5,
            server_header=False,
        )
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket, so that a busy port is known before anything is loaded.

    Raises:
        UsageError: unknown host, port in use, or not permitted.
    """
    where = f"{host}:{port}"
    if not 0 <= port <= 65535:  # the resolver would take it modulo 65536
        raise UsageError(f"{port} is not a port", where=where, fix="choose a --port from 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"host {host!r} cannot be resolved", where=where, fix="give an address of this machine"
        ) from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        raise _bind_error(error, where) from error
    return listener


def base_url(listener: socket.socket) -> str:
    """``http://host:port/v1`` of a bound socket, as the OpenAI client wants it."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def _bind_error(error: OSError, where: str) -> UsageError:
    if error.errno == errno.EADDRINUSE:
        return UsageError(
            f"{where} is already in use", where=where, fix="stop the other program or choose another --port"
        )
    if error.errno == errno.EACCES:
        return UsageError(f"no permission to listen on {where}", where=where, fix="choose a --port above 1023")
    return UsageError(f"cannot listen on {where}: {error}", where=where, fix="choose another --host or --port")
