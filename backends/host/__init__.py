"""Shared parts of all backends in host memory: buffers, bindings, collectives and progress."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...graph.old_names import make_package_getattr

if not TYPE_CHECKING:
    __getattr__ = make_package_getattr(__name__, **dict.fromkeys(("HostBackend",), "hocket.backends.host.host_backend"))
