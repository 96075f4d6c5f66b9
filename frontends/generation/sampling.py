"""From logits to the next token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from ...backends.cpu.choices import descending, largest
from ...graph.lazy_dataclass import dataclass
from ...graph.validation import (
    ArgumentKind,
    integer_between,
    list_of,
    number_between,
    pair_of,
    require,
    validate_constructor,
)
from ..errors import ModelError

MAX_PARTIAL_SORT = 256
"""More candidates than that are sorted with all others instead of picked out."""


MAX_LOGIT_CHANGE = 1e30
"""The largest bias and penalty: sums of them stay float32."""
F32_MAX = np.finfo(np.float32).max
BIAS_KIND = ArgumentKind(
    "pairs of a token and a number of at most 1e30 either way, or -inf to ban the token",
    list_of(
        pair_of(
            integer_between(0, 2**31),
            number_between(-MAX_LOGIT_CHANGE, MAX_LOGIT_CHANGE) | ArgumentKind("-inf", lambda v: v == -math.inf),
        ),
        "",
    ).accepts,
)
AT_LEAST_0 = ArgumentKind("a number of at least 0", number_between(0, MAX_LOGIT_CHANGE).accepts)
SAMPLING_FIELD_KINDS: Mapping[str, ArgumentKind] = MappingProxyType(
    {
        "temperature": AT_LEAST_0,
        "top_k": integer_between(0, 2**31),
        "top_p": ArgumentKind("a number above 0 and at most 1", lambda v: number_between(0, 1).accepts(v) and v > 0),
        "min_p": ArgumentKind(
            "a number of at least 0 and below 1", lambda v: number_between(0, 1).accepts(v) and v < 1
        ),
        "repeat_penalty": ArgumentKind("a number above 0", lambda v: AT_LEAST_0.accepts(v) and v > 0),
        "repeat_last_n": integer_between(-1, 2**31),
        "presence_penalty": number_between(-MAX_LOGIT_CHANGE, MAX_LOGIT_CHANGE),
        "frequency_penalty": number_between(-MAX_LOGIT_CHANGE, MAX_LOGIT_CHANGE),
        "bias": BIAS_KIND,
    }
)


@validate_constructor(ModelError)
@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose: biases and penalties, then the best at temperature 0, else top-k, top-p, min-p, temperature.

    The order and the penalties are those of llama.cpp.  `bias` are pairs of a token and a number that is
    added to its logit; -inf bans the token.  Of the last `repeat_last_n` tokens (0: none, -1: all) each has its logit
    divided by `repeat_penalty` where it is positive and multiplied where not, and lowered by `presence_penalty` once
    and by `frequency_penalty` for each time it occurs.
    `top_k` 0, `top_p` 1, `min_p` 0, `repeat_penalty` 1 and the other penalties 0 leave their part out.  Raises
    `ModelError`.
    """

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for name, kind in SAMPLING_FIELD_KINDS.items():
            require(ModelError, "sampling", name.replace("_", "-"), getattr(self, name), kind)

    def check(self, vocabulary: int) -> None:
        """Raises `ModelError` if a bias is of none of so many tokens."""
        for token, _ in self.bias:
            if not 0 <= token < vocabulary:
                raise ModelError(f"logit bias: token {token}; need 0 to {vocabulary - 1}, as hocket tokenize prints")

    def choose(self, logits: npt.NDArray[np.float32], rng: np.random.Generator, before: Sequence[int] = ()) -> int:
        """One token id from logits ``[vocabulary]``; `before` are the tokens that stand before it, the last one last.

        Raises `ModelError` if the logits are no numbers to choose by, or a bias is of no token.
        """
        best = int(np.argmax(logits))  # of a NaN, if there is one
        if not np.isfinite(logits[best]):
            raise ModelError(
                f"the model gives token {best} the logit {logits[best]}; its file is damaged, fetch it again"
            )
        changed = self._apply_penalties(logits, before)
        if self.temperature == 0:
            return best if changed is logits else int(np.argmax(changed))
        ids, kept = self.candidates(changed)
        with np.errstate(over="ignore"):  # a very low temperature leaves only the first
            return int(rng.choice(ids, p=softmax((kept - kept[0]) / self.temperature)))

    def _apply_penalties(self, logits: npt.NDArray[np.float32], before: Sequence[int]) -> npt.NDArray[np.float32]:
        """The logits with biases and penalties; the very array where there are none."""
        penalises = self.repeat_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        recent = before[max(0, len(before) - self.repeat_last_n) :] if self.repeat_last_n >= 0 else before
        if not self.bias and not (penalises and len(recent)):
            return logits
        changed = logits.copy()
        self.check(len(logits))
        for token, added in self.bias:
            changed[token] += np.float32(added)
        if penalises and len(recent):
            ids, counts = np.unique(np.asarray(recent, np.int64), return_counts=True)
            old = changed[ids]
            lowered = counts * np.float32(self.frequency_penalty) + np.float32(self.presence_penalty)
            with np.errstate(over="ignore"):  # a penalty alone bans no token
                scaled = np.where(old > 0, old / np.float32(self.repeat_penalty), old * np.float32(self.repeat_penalty))
                changed[ids] = np.where(old > -np.inf, np.clip(scaled - lowered, -F32_MAX, F32_MAX), old)
        if changed.max() == -np.inf:
            raise ModelError("logit bias: every token that may come next is banned; leave out a bias of -inf")
        return changed

    def candidates(self, logits: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Ids that survive the filters, most likely first, with their logits; at least one always does."""
        few = 0 < self.top_k <= MAX_PARTIAL_SORT and self.top_k < len(logits)
        ids = largest(logits, self.top_k) if few else descending(logits)[: self.top_k or None]
        kept = logits[ids].astype(np.float64)
        p = softmax(kept)
        count = int(np.searchsorted(np.cumsum(p), self.top_p)) + 1 if self.top_p < 1 else len(p)
        count = min(count, int(np.count_nonzero(p >= self.min_p * p[0])))
        return ids[:count], kept[:count]


def softmax(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    e = np.exp(x - x.max())
    return e / e.sum()
