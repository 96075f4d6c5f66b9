"""Deprecated old names of renamed definitions, which work until version 0.3."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
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


def make_package_getattr(package: str, **modules: str) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a package for definitions that have moved to other modules; reading one warns.

    Args:
        package: The full name of the package.
        **modules: By the name of a moved definition, the full name of the module that has it now.

    Returns:
        A function that warns with `DeprecationWarning` for these definitions, and raises `AttributeError` for any other
        name.
    """

    def find_in_new_module(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        warn_of_old_name(package, name, f"{modules[name]}.{name}")
        return getattr(import_module(modules[name]), name)

    return find_in_new_module


def warn_of_old_name(module: str, old: str, new: str) -> None:
    """Warn with `DeprecationWarning` that the attribute `old` of `module` now has the name `new`.

    Only the ``__getattr__`` of the module may call this function, because the warning names the line of its caller.
    """
    warnings.warn(f"{module}.{old} is now called {new}; the old name goes in 0.3", DeprecationWarning, stacklevel=3)


class RenamedAttribute:
    """An attribute of a class under its old name: reading it warns, and gives the attribute with the new name."""

    def __init__(self, new_name: str) -> None:
        self.new_name = new_name

    def __set_name__(self, owner: type, name: str) -> None:
        self.old_name = f"{owner.__name__}.{name}"

    def __get__(self, instance: object | None, owner: type) -> Any:
        if instance is None:
            return self
        message = f"{self.old_name} is now called {self.new_name}; the old name goes in 0.3"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return getattr(instance, self.new_name)
