"""From logits to the next token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from ..backends.cpu.choices import descending, largest
from ..graph.arguments import FINITE, Kind, demand, whole
from .errors import ModelError

FEW = 256
"""More candidates than that are sorted with all others instead of picked out."""


SAMPLING: Mapping[str, Kind] = MappingProxyType(
    {"temperature": FINITE, "top_k": whole(-(2**31), 2**31), "top_p": FINITE, "min_p": FINITE}
)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose: greedy at temperature 0; otherwise top-k, then top-p, then min-p, then temperature.

    The order is that of llama.cpp.  `top_k` 0, `top_p` 1 and `min_p` 0 leave their filter out.  Raises `ModelError`.
    """

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05

    def __post_init__(self) -> None:
        for name, kind in SAMPLING.items():
            demand(ModelError, "Sampling", name, getattr(self, name), kind)
        legal = {
            "temperature": (self.temperature >= 0 and np.isfinite(self.temperature), "at least 0"),
            "top-k": (self.top_k >= 0, "at least 0"),
            "top-p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min-p": (0 <= self.min_p < 1, "at least 0 and below 1"),
        }
        for name, (ok, need) in legal.items():
            if not ok:
                raise ModelError(f"{name} is {getattr(self, name.replace('-', '_'))}; it must be {need}")

    def choose(self, logits: npt.NDArray[np.float32], rng: np.random.Generator) -> int:
        """One token id from logits ``[vocabulary]``.  Raises `ModelError` if they are no numbers to choose by."""
        best = int(np.argmax(logits))  # of a NaN, if there is one
        if not np.isfinite(logits[best]):
            raise ModelError(
                f"the model gives token {best} the logit {logits[best]}; its file is damaged, fetch it again"
            )
        if self.temperature == 0:
            return best
        ids, kept = self.candidates(logits)
        with np.errstate(over="ignore"):  # a very low temperature leaves only the first
            return int(rng.choice(ids, p=softmax((kept - kept[0]) / self.temperature)))

    def candidates(self, logits: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Ids that survive the filters, most likely first, with their logits; at least one always does."""
        few = 0 < self.top_k <= FEW and self.top_k < len(logits)
        ids = largest(logits, self.top_k) if few else descending(logits)[: self.top_k or None]
        kept = logits[ids].astype(np.float64)
        p = softmax(kept)
        count = int(np.searchsorted(np.cumsum(p), self.top_p)) + 1 if self.top_p < 1 else len(p)
        count = min(count, int(np.count_nonzero(p >= self.min_p * p[0])))
        return ids[:count], kept[:count]


def softmax(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    e = np.exp(x - x.max())
    return e / e.sum()
