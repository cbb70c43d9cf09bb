"""The gateway as an ASGI application."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from serving.chat import ROUTE, ChatService
from serving.envelope import Envelope, error_response
from serving.errors import ApiError
from serving.models import ModelSource
from serving.observe import GatewayMetrics
from serving.options import GatewayOptions
from serving.pool import ModelCard, ModelPool
from serving.worker import Clock


def create_app(
    source: ModelSource,
    *,
    domains: Sequence[str] | None = None,
    stages: Sequence[str] = ("production", "staging"),
    options: GatewayOptions | None = None,
    allowed_hosts: Collection[str] | None = None,
    clock: Clock = time.monotonic,
) -> FastAPI:
    """Build the gateway; models are loaded and followed from the application's start to its stop.

    Args:
        source: where models come from.
        domains: the domains to serve; None serves all that the source knows.
        stages: where a domain's default version is looked for, in this order.
        options: limits and intervals.
        allowed_hosts: ``Host`` names that are answered; None answers all.
        clock: monotonic seconds (tests bring their own).
    """
    settings = options or GatewayOptions()
    metrics = GatewayMetrics()
    pool = ModelPool(source, domains, stages, settings, metrics, clock)
    chat = ChatService(pool, metrics, settings, clock)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await pool.start()
        try:
            yield
        finally:
            await pool.close()

    app = FastAPI(
        title="Senmon", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False, lifespan=lifespan
    )
    app.add_middleware(Envelope, allowed_hosts=allowed_hosts)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_api_route(ROUTE, chat.handle, methods=["POST"], response_model=None)
    _add_model_routes(app, pool)
    _add_operations_routes(app, pool, metrics)
    return app


def _add_model_routes(app: FastAPI, pool: ModelPool) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_card(card) for card in pool.cards()]}

    @app.get("/v1/models/{domain}")
    async def model(domain: str) -> dict[str, Any]:
        for card in pool.cards():
            if card.domain == domain:
                return _card(card)
        raise ApiError(404, "The model does not exist.", code="model_not_found", param="model")


def _add_operations_routes(app: FastAPI, pool: ModelPool, metrics: GatewayMetrics) -> None:
    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        problems = pool.unready()
        body = {"status": "unready" if problems else "ready", "problems": problems}
        return JSONResponse(body, status_code=503 if problems else 200)

    @app.get("/metrics")
    async def exposition() -> Response:
        return Response(metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


def _card(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.domain,
        "object": "model",
        "created": card.loaded_at,
        "owned_by": "senmon",
        "model_version": f"{card.domain}:{card.version}",
    }


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    names = {404: "not_found", 405: "method_not_allowed"}
    body = ApiError(error.status_code, f"{error.detail}.", code=names.get(error.status_code, "http_error"))
    return error_response(body)
