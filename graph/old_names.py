"""Deprecated old names of renamed definitions, which work until version 0.3."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any


def make_module_getattr(namespace: Mapping[str, Any], **new_names: str) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a module (PEP 562) that finds renamed definitions by their old names.

    Args:
        namespace: The globals of the module.
        **new_names: The new name of each old name.

    Returns:
        A function that warns with `DeprecationWarning` for an old name, and raises `AttributeError` for any other name.
    """
    module = namespace["__name__"]

    def find_by_old_name(name: str) -> Any:
        if name not in new_names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_of_old_name(module, name, new_names[name])
        return namespace[new_names[name]]

    return find_by_old_name


def warn_of_old_name(module: str, old: str, new: str) -> None:
    """Warn with `DeprecationWarning` that the attribute `old` of `module` now has the name `new`.

    Only the ``__getattr__`` of the module may call this function, because the warning names the line of its caller.
    """
    warnings.warn(f"{module}.{old} is now called {new}; the old name goes in 0.3", DeprecationWarning, stacklevel=3)
