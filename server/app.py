"""The ASGI application: its routes and its middleware."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..frontends.serving.service import ModelService
from .endpoints.anthropic import build_message_routes
from .endpoints.native import build_native_routes
from .endpoints.openai_chat import build_chat_routes
from .endpoints.openai_responses import build_response_routes
from .endpoints.openai_text import build_completion_embedding_and_model_routes
from .endpoints.request_traces import build_trace_routes
from .endpoints.rerank import build_rerank_routes
from .endpoints.slot_actions import build_slot_action_route
from .errors import ApiError
from .options import ServerOptions
from .security import ApiKeyOrHostMiddleware, BodyLimitMiddleware, CorsOriginMiddleware, ErrorResponseMiddleware
from .state import ServingState


def build_routes() -> list[Route]:
    """Return the routes of all endpoints."""
    builders = (
        build_chat_routes,
        build_response_routes,
        build_completion_embedding_and_model_routes,
        build_rerank_routes,
        build_native_routes,
        build_message_routes,
        build_slot_action_route,
        build_trace_routes,
    )
    return [route for build in builders for route in build()]


def create_app(service: ModelService, options: ServerOptions) -> Starlette:
    """Create the ASGI application that serves a model.

    Args:
        service: The model with its engine.
        options: Access, limits and defaults; `run_server` uses the address.
    """
    state = ServingState(service, options)
    routes = build_routes()
    layers = [
        Middleware(ErrorResponseMiddleware, state.metrics, [route.path for route in routes]),
        Middleware(CorsOriginMiddleware, options.cors_origins),
        Middleware(ApiKeyOrHostMiddleware, options),
        Middleware(BodyLimitMiddleware, options.max_body_bytes, options.body_seconds),
    ]

    app = Starlette(
        routes=routes,
        middleware=layers,
        exception_handlers={HTTPException: _raise_unknown_route_as_api_error},
    )
    app.router.redirect_slashes = False
    app.state.serving = state
    return app


async def _raise_unknown_route_as_api_error(request: Request, error: Exception) -> Response:
    """Raise the error of an unknown path or method as an `ApiError`, which has the format of the API."""
    assert isinstance(error, HTTPException)
    messages = {
        404: f"there is no path {request.url.path!a:.80}",
        405: f"{request.method} is not a method of this path",
    }
    raise ApiError(error.status_code, messages.get(error.status_code, error.detail))
