"""Old names of the keywords of `op`, which packages may use until version 0.3."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])
OLD_KEYWORDS: Mapping[str, str] = MappingProxyType(
    {
        "form": "signature_key",
        "needs": "check",
        "where": "derived_sizes",
        "share": "active_fraction",
        "whole": "unsharded_dimensions",
        "must": "is_required",
    }
)
"""The present name of each keyword by its name before 0.2."""


def accept_old_keywords(function: F) -> F:
    """Wrap `function` so that callers may still use the former names of its keyword arguments (`OLD_KEYWORDS`)."""

    @wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        return function(*args, **{OLD_KEYWORDS.get(name, name): value for name, value in keywords.items()})

    return cast(F, call)
