"""The error of everything that comes from outside: files, prompts, options."""

from __future__ import annotations

from ..graph.errors import HocketError


class ModelError(HocketError):
    """A model file, a prompt or an option cannot be used; the one-line message says what, got, need, do."""
