"""Backends are found through the entry-point group ``hocket.backends``; the entry's name is the device kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ..graph.errors import BackendError
from .base import Backend, Device

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "hocket.backends"


def registered() -> dict[str, EntryPoint]:
    """Entry points by device kind.  Raises `BackendError` if two packages claim one kind."""
    from importlib.metadata import entry_points  # 15 ms that `import hocket` need not pay

    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        other = found.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise BackendError(
                f"backend {entry.name!r} is registered as {other.value} and as {entry.value}; remove one"
            )
    return found


def load(kind: str) -> Backend:
    """The backend for a device kind.  Raises `BackendError` with the known kinds, or why it does not load."""
    known = registered()
    if kind not in known:
        raise BackendError(f"there is no backend for device kind {kind!r}; known kinds: {', '.join(sorted(known))}")
    try:
        return cast(Backend, known[kind].load()())
    except ImportError as why:
        raise BackendError(f"backend {kind!r} does not load: {why}") from None


def find(name: str) -> tuple[Backend, Device]:
    """Backend and device of a name like ``cpu:0`` (or ``cpu``, its first).  Raises `BackendError`."""
    kind, _, number = name.partition(":")
    if not number.isdecimal() and number:
        raise BackendError(f"device {name!r}: after the colon comes a number, as in {kind}:0")
    backend = load(kind)
    return backend, backend.device(int(number or 0))
