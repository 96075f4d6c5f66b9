"""What the programs of a plan will call, as far as backends can say before there is memory for them."""

from __future__ import annotations

from collections.abc import Sequence

from ...backends.base import Called, Foretells
from ..plan import Lane


def calls_of(lane: Lane) -> Sequence[Called]:
    """The kernels of one device's program and where they are written; none where its backend cannot say."""
    backend = lane.backend
    return backend.foretold(lane.program, lane.device) if isinstance(backend, Foretells) else ()
