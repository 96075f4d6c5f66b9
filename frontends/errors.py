"""The errors for all input from outside: files, prompts and options."""

from __future__ import annotations

from ..graph.errors import HocketError


class ModelError(HocketError):
    """A model file, a prompt or an option cannot be used; the message gives the value, the need and the remedy."""


class NonFiniteLogitError(ModelError):
    """The error that the largest logit of a step is NaN or infinite, which is no fault of the request."""
