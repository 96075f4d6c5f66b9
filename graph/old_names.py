"""Renamed definitions under their old names, until version 0.3."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any


def make_module_getattr(namespace: Mapping[str, Any], **new_names: str) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a module (PEP 562) that finds definitions by their old names.

    Args:
        namespace: The globals of the module.
        **new_names: The new name of each old name.

    Returns:
        A function that warns with `DeprecationWarning` and raises `AttributeError` for other names.
    """
    module = namespace["__name__"]

    def find_by_old_name(name: str) -> Any:
        if name not in new_names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_of_old_name(module, name, new_names[name])
        return namespace[new_names[name]]

    return find_by_old_name


def warn_of_old_name(module: str, old: str, new: str) -> None:
    """Warn the code that asks for the attribute `old` of `module`. Call it from the module's ``__getattr__`` alone."""
    warnings.warn(f"{module}.{old} is now called {new}; the old name goes in 0.3", DeprecationWarning, stacklevel=3)
