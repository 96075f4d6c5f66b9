"""Several processes, the ranks: how they start, talk, agree, and end together when one of them fails."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .world import ALONE as ALONE
    from .world import RanksError as RanksError
    from .world import World as World


def __getattr__(name: str) -> Any:
    if name not in ("ALONE", "RanksError", "World"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import world  # with NumPy, before which a command has to say how it uses threads

    return getattr(world, name)
