"""Errors as HTTP responses: the status codes, error types and bodies of the APIs."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Mapping

import msgspec

from ..frontends.errors import ModelError
from ..frontends.serving.requests import ContextExceededError, QueueFullError
from ..graph.errors import HocketError

LOGGER = logging.getLogger("hocket.server")
ERROR_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    431: "invalid_request_error",
    499: "client_disconnected",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
    507: "server_error",
}
ANTHROPIC_ERROR_TYPES: Mapping[int, str] = {500: "api_error", 501: "api_error", 503: "overloaded_error"}
"""Error types of Anthropic's API by status, where they differ from `ERROR_TYPES`."""


class ApiError(HocketError):
    """An error of a request, with its HTTP status.

    Args:
        status: The HTTP status.
        message: One line for the client.
        param: The wrong field of the body.
        type: The error type; by default the type of the status.
        retry_seconds: The value of ``Retry-After``.
        extra: Further fields of the error object.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        type: str | None = None,
        retry_seconds: float | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.type = type or ERROR_TYPES.get(status, "invalid_request_error")
        self.retry_seconds = retry_seconds
        self.extra = dict(extra or {})

    @property
    def headers(self) -> dict[str, str]:
        """The HTTP headers of the error response."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {} if self.retry_seconds is None else {"Retry-After": str(max(1, math.ceil(self.retry_seconds)))}

    def as_openai_body(self) -> dict[str, object]:
        """Return the error body in the format of OpenAI. The code is the status, as in llama-server."""
        fields = {"message": self.message, "type": self.type, "param": self.param, "code": self.status}
        return {"error": {**fields, **self.extra}}

    def as_anthropic_body(self) -> dict[str, object]:
        """Return the error body in the format of Anthropic."""
        default = ERROR_TYPES.get(self.status)
        type_ = ANTHROPIC_ERROR_TYPES.get(self.status, self.type) if self.type == default else "invalid_request_error"
        return {"type": "error", "error": {"type": type_, "message": self.message}}


def make_bad_request_error(message: str, param: str | None = None) -> ApiError:
    """Make the error of a bad request (status 400); `param` is the wrong field of the body."""
    return ApiError(400, message, param=param)


def as_api_error(error: BaseException) -> ApiError:
    """Convert an exception to an `ApiError`.

    An unexpected exception is logged with an id. The client gets the id and no other detail.
    """
    match error:
        case ApiError():
            return error
        case QueueFullError():
            return ApiError(429, str(error), retry_seconds=error.retry_seconds)
        case ContextExceededError():
            return make_context_exceeded_error(error.prompt_tokens, error.context)
        case ModelError():
            return make_bad_request_error(str(error))
        case msgspec.MsgspecError():
            return make_bad_request_error(f"the body does not fit: {error}")
        case RecursionError():
            return make_bad_request_error("the body is nested too deeply")
    number = secrets.token_hex(6)
    LOGGER.error("error %s", number, exc_info=error)
    return ApiError(500, f"the server has failed; its log has the reason under {number}", extra={"id": number})


def make_context_exceeded_error(prompt_tokens: int, context: int) -> ApiError:
    """Make the error of a prompt that exceeds the context; both sizes are in tokens."""
    return ApiError(
        400,
        f"the prompt is too large: it has {prompt_tokens} tokens, which exceeds the available context size of "
        f"{context} tokens; shorten it, or start the server with a larger --ctx-size",
        type="exceed_context_size_error",
        extra={"n_prompt_tokens": prompt_tokens, "n_ctx": context},
    )
