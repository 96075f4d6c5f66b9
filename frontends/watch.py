"""Values watched while a session runs: which, and who is told their statistics after every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from ..backends.base import Array
from ..graph.lazy_dataclass import dataclass
from ..graph.validation import CALLABLE, TEXT, require
from ..scheduler import Statistics
from ..scheduler.units import columns
from .errors import ModelError


@dataclass(frozen=True, slots=True)
class Seen:
    """What one step computed: statistics by the names of values; the step ran `tokens` tokens of the first sequence,
    from position `first` on."""

    first: int
    tokens: int
    values: Mapping[str, Statistics]

    @classmethod
    def of(cls, values: Mapping[str, Array], first: int, tokens: int) -> Seen:
        return cls(first, tokens, {name: Statistics.of(array) for name, array in values.items()})

    def lines(self) -> Iterator[str]:
        """A table, a line a value."""
        last = self.first + self.tokens - 1
        where = f"token {self.first}" if self.tokens == 1 else f"tokens {self.first} to {last}"
        rows: list[tuple[str, ...]] = [(where, "shape", "min", "max", "mean", "norm", "NaN")]
        for name, s in self.values.items():
            numbers = (f"{x:.6g}" for x in (s.least, s.most, s.mean, s.norm))
            rows.append((f"%{name}", f"[{','.join(map(str, s.shape))}]", *numbers, str(s.nans)))
        yield from columns(rows, "llrrrrr")


@dataclass(frozen=True, slots=True)
class Watch:
    """The values in whose names a regular expression is found; `see` is called with their statistics after each step.

    Watched values are whole, however they lie on the devices.  Steps are as long as they have tokens, so that no
    statistic counts padding, and kernels that compute several nodes at once give way where a value between them is
    watched.
    """

    pattern: str
    see: Callable[[Seen], None]

    def __post_init__(self) -> None:
        require(ModelError, "Watch", "pattern", self.pattern, TEXT)
        require(ModelError, "Watch", "see", self.see, CALLABLE)
