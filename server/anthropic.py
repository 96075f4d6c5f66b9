"""``POST /v1/messages`` of Anthropic, and the count of its tokens."""

from __future__ import annotations

from starlette.routing import Route


def build_routes() -> list[Route]:
    """Return the routes of this module."""
    return []
