"""Several processes, the ranks: how they start, talk, agree, and end together when one of them fails."""

from .world import ALONE as ALONE
from .world import RanksError as RanksError
from .world import World as World
