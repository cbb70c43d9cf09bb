"""Errors as the OpenAI clients understand them."""

from __future__ import annotations

from typing import Any

from infra.errors import SenmonError


class ApiError(SenmonError):
    """An HTTP error of the gateway; becomes ``{"error": {message, type, param, code}}``.

    Args:
        status: HTTP status; bad input is 400 (never 422), our own capacity 503, a spent latency budget 504.
        message: one sentence for the caller; never contains prompts, keys or stack traces.
        code: short machine-readable name.
        param: the request field at fault.
        retry_after: whole seconds for the ``Retry-After`` header.
    """

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message, where=param or "")
        self.status = status
        self.code = code
        self.param = param
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """The error object of the OpenAI API."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.what, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """``Retry-After`` where it applies."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


def bad_request(message: str, param: str | None, code: str = "invalid_value") -> ApiError:
    """400: the request itself is wrong."""
    return ApiError(400, message, code=code, param=param)


def not_supported(param: str, detail: str = "") -> ApiError:
    """400: a known field which this engine cannot honour; it is never ignored silently."""
    return ApiError(
        400,
        f"'{param}' is not supported by this engine.{detail and ' ' + detail}",
        code="unsupported_parameter",
        param=param,
    )


def internal_error() -> ApiError:
    """500: a mistake of ours; the log has the trace."""
    return ApiError(500, "Internal error; the log has it under the request id.", code="internal_error")
