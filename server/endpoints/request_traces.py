"""``GET /requests`` and ``GET /requests/ID/trace``: the last requests, and one request over the steps of the engine."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...frontends.serving.step_history import RequestRecord, RequestTrace
from ...view.request_page import build_request_page
from ..errors import ApiError, make_bad_request_error
from ..responses import JsonResponse
from ..state import get_serving_state

FORMATS = ("json", "html")


async def list_requests(request: Request) -> Response:
    """Handle ``GET /requests``: list the last requests, newest first, without their texts."""
    records = get_serving_state(request).service.list_requests()
    offset = time.time() - time.monotonic()
    return JsonResponse([describe_record_in_relative_seconds(record, offset) for record in reversed(records)])


async def show_request_steps(request: Request) -> Response:
    """Handle ``GET /requests/ID/trace``: return the steps of each choice of a response, as JSON or as a page."""
    name, format = request.path_params["id"], request.query_params.get("format", "json")
    if format not in FORMATS:
        raise make_bad_request_error(f"format is {format!a:.40}; need one of {', '.join(FORMATS)}", "format")
    traces = get_serving_state(request).service.trace_request_or_choices(name)
    if not traces:
        raise ApiError(404, f"there is no request {name!a:.80} among the last ones; GET /requests lists them")
    choices = [describe_trace(trace) for trace in traces]
    if format == "html":
        return Response(build_request_page(name, choices), media_type="text/html; charset=utf-8")
    return JsonResponse({"id": name, "choices": choices})


def describe_record_in_relative_seconds(record: RequestRecord, unix_offset: float) -> dict[str, object]:
    """Describe the course of a request as a JSON object; all durations are in seconds after its submission."""

    def since(moment: float | None) -> float | None:
        return None if moment is None else round(moment - record.submitted, 6)

    return {
        "id": record.id,
        "state": "ended" if record.ended is not None else "queued" if record.started is None else "running",
        "reason": record.reason,
        "submitted": round(record.submitted + unix_offset, 3),
        "started_after": since(record.started),
        "ended_after": since(record.ended),
        "id_slot": record.slot,
        "starts": record.starts,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "new_tokens": record.new_tokens,
    }


def describe_trace(trace: RequestTrace) -> dict[str, object]:
    """Describe a request with its steps as a JSON object.

    A step has `tokens` of the request, and `rows` of all its `requests` together.
    """
    record = trace.record
    steps: list[Mapping[str, object]] = [
        {
            "step": step.number,
            "kind": step.kind,
            "start_after": round(step.start - record.submitted, 6),
            "seconds": round(step.seconds, 6),
            "tokens": sum(count for id, count in step.tokens if id == record.id),
            "rows": sum(count for _, count in step.tokens),
            "requests": len(step.tokens),
        }
        for step in trace.steps
    ]
    return {
        **describe_record_in_relative_seconds(record, trace.unix_offset),
        "mean_requests": _compute_mean_decode_requests(steps),
        "steps": steps,
    }


def _compute_mean_decode_requests(steps: Sequence[Mapping[str, object]]) -> float:
    """Compute the mean number of decoding requests in the decode and mixed steps; 0 without such steps.

    One request of a mixed step reads its prompt.
    """
    decoded = [(step["requests"], step["kind"] == "mixed") for step in steps if step["kind"] != "prompt"]
    counts = [count - is_mixed for count, is_mixed in decoded if isinstance(count, int)]
    return round(sum(counts) / len(counts), 3) if counts else 0.0


def build_trace_routes() -> list[Route]:
    """Return the routes of request traces."""
    return [
        Route("/requests", list_requests, methods=["GET"]),
        Route("/requests/{id}/trace", show_request_steps, methods=["GET"]),
    ]
