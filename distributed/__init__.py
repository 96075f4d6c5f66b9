"""Processes that run one program together, the ranks: start, messages, agreement, and a common end on a failure."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .world import SINGLE_PROCESS as SINGLE_PROCESS
    from .world import RanksError as RanksError
    from .world import World as World


def __getattr__(name: str) -> Any:
    if name not in ("RanksError", "SINGLE_PROCESS", "World"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import world  # with NumPy, before which a command has to say how it uses threads

    return getattr(world, name)
