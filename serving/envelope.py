"""What surrounds every HTTP exchange: the request id, the allowed hosts, and errors in one form."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Collection

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.errors import ApiError, internal_error

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_STATE_KEY = "senmon_request_id"


def request_id(scope: Scope) -> str:
    """The id of this request, as echoed in ``X-Request-Id``."""
    return str(scope[_STATE_KEY])


def clean_request_id(value: str | None) -> str:
    """The caller's id when it is harmless, otherwise a new one."""
    if value is not None and _REQUEST_ID.fullmatch(value):
        return value
    return f"req-{uuid.uuid4().hex}"


def error_response(error: ApiError) -> JSONResponse:
    """An error in OpenAI's form."""
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers())


class Envelope:
    """ASGI middleware around the whole application.

    Args:
        app: the application.
        allowed_hosts: ``Host`` names that are answered; None answers all. On a loopback address this keeps web
            pages from reaching the gateway by DNS rebinding.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: Collection[str] | None) -> None:
        self._app = app
        self._hosts = None if allowed_hosts is None else frozenset(allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        identity = clean_request_id(headers.get("x-request-id"))
        scope[_STATE_KEY] = identity
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["X-Request-Id"] = identity
            await send(message)

        if not self._allows(headers.get("host")):
            refusal = ApiError(400, "This host name is not served here.", code="invalid_host")
            await error_response(refusal)(scope, receive, send_with_id)
            return
        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception("request %s failed", identity)
            if started:
                raise
            await error_response(internal_error())(scope, receive, send_with_id)

    def _allows(self, host: str | None) -> bool:
        if self._hosts is None:
            return True
        name = (host or "").lower()
        name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
        return name in self._hosts
