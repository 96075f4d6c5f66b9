"""Samples the next token from logits: bias, penalties, top-k, top-p, min-p, temperature."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ...backends.cpu.top_k import argsort_descending, find_top_k
from ...graph.lazy_dataclass import dataclass
from ...graph.old_names import RenamedAttribute
from ...graph.validation import (
    ArgumentKind,
    instance_of,
    integer_between,
    list_of,
    number_between,
    pair_of,
    require,
    validate_constructor,
)
from ..config_options import check_options, option_field
from ..errors import ModelError, NonFiniteLogitError
from ..flag_values import parse_logit_bias, parse_natural_or_minus_one, parse_number, parse_top_k_or_all

if TYPE_CHECKING:
    from ..inference.decoding.device_tokens import TokenCandidates, TokenChoice

MAX_PARTIAL_SORT = 256
"""Largest top-k that is selected by a partial sort; a larger one sorts all logits."""


MAX_LOGIT_CHANGE = 1e30
"""Largest magnitude of a bias or a penalty, so that their sums fit float32."""
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
LOGITS_KIND = ArgumentKind(
    "an array of floats [vocabulary]",
    lambda v: isinstance(v, np.ndarray) and v.ndim == 1 and v.size > 0 and v.dtype.kind == "f",
)
RNG_KIND = instance_of(np.random.Generator, description="a random generator of NumPy")
TOKENS_KIND = ArgumentKind(
    "a sequence of tokens", lambda v: isinstance(v, Sequence | np.ndarray) and not isinstance(v, str | bytes)
)
AT_LEAST_0 = ArgumentKind("a number of at least 0", number_between(0, MAX_LOGIT_CHANGE).accepts)
UNIT_KIND = number_between(0, 1)
DEFAULT_TEMPERATURE = 0.8
"""The temperature of commands, of requests to a server and of `Model` if none is given."""


@validate_constructor(ModelError)
@dataclass(frozen=True, slots=True)
class Sampling:
    """Options for the choice of a token from logits.

    The order is bias, penalties, top-k, top-p, min-p, temperature, as in llama.cpp. Temperature 0 takes the largest
    logit after bias and penalties.

    Args:
        temperature: Divisor of the logits; 0 takes the largest logit.
        top_k: Number of most probable tokens to keep; 0 keeps all.
        top_p: Keep the most probable tokens up to this sum of probabilities; 1 keeps all.
        min_p: Keep tokens with at least this fraction of the largest probability; 0 keeps all.
        repeat_penalty: Divides positive logits of recent tokens and multiplies negative ones; 1 has no effect.
        repeat_last_n: Number of recent tokens for the penalties; 0: none, -1: all.
        presence_penalty: Number that is subtracted from the logit of each recent token.
        frequency_penalty: Number that is subtracted once per occurrence of a recent token.
        bias: Pairs of a token and the number that is added to its logit; -inf bans the token.

    Raises:
        ModelError: A value is out of range.
    """

    temperature: float = option_field(
        0.0,
        AT_LEAST_0,
        *("--temp", "--temperature"),
        llama_cpp="c",
        type=parse_number,
        metavar="T",
        help=f"temperature; 0 takes the most probable token ({DEFAULT_TEMPERATURE})",
    )
    top_k: int = option_field(
        40,
        integer_between(0, 2**31),
        "--top-k",
        llama_cpp="c",
        type=parse_top_k_or_all,
        metavar="K",
        help="keep the K most probable tokens; 0 or -1: all (40)",
    )
    top_p: float = option_field(
        0.95,
        ArgumentKind("a number above 0 and at most 1", lambda v: UNIT_KIND.accepts(v) and v > 0),
        "--top-p",
        llama_cpp="c",
        type=parse_number,
        metavar="P",
        help="keep the most probable up to P in sum (0.95)",
    )
    min_p: float = option_field(
        0.05,
        ArgumentKind("a number of at least 0 and below 1", lambda v: UNIT_KIND.accepts(v) and v < 1),
        "--min-p",
        llama_cpp="c",
        type=parse_number,
        metavar="P",
        help="keep those above P times the maximum (0.05)",
    )
    repeat_penalty: float = option_field(
        1.0,
        ArgumentKind("a number above 0", lambda v: AT_LEAST_0.accepts(v) and v > 0),
        "--repeat-penalty",
        llama_cpp="c",
        type=parse_number,
        metavar="X",
        help="divide logits of recent tokens by X (1)",
    )
    repeat_last_n: int = option_field(
        64,
        integer_between(-1, 2**31),
        "--repeat-last-n",
        llama_cpp="c",
        type=parse_natural_or_minus_one,
        metavar="N",
        help="number of recent tokens; -1: all (64)",
    )
    presence_penalty: float = option_field(
        0.0,
        number_between(-MAX_LOGIT_CHANGE, MAX_LOGIT_CHANGE),
        "--presence-penalty",
        llama_cpp="c",
        type=parse_number,
        metavar="X",
        help="subtract X from logits of recent tokens (0)",
    )
    frequency_penalty: float = option_field(
        0.0,
        number_between(-MAX_LOGIT_CHANGE, MAX_LOGIT_CHANGE),
        "--frequency-penalty",
        llama_cpp="c",
        type=parse_number,
        metavar="X",
        help="subtract X times the number of occurrences from logits of recent tokens (0)",
    )
    bias: tuple[tuple[int, float], ...] = option_field(
        (),
        BIAS_KIND,
        *("-l", "--logit-bias"),
        llama_cpp="c",
        type=parse_logit_bias,
        action="append",
        metavar="ID=X",
        help="add X to the logit of a token",
    )

    def __post_init__(self) -> None:
        check_options(self, "Sampling")

    check = RenamedAttribute("check_logit_bias_tokens")
    candidates = RenamedAttribute("filter_tokens")
    choose = RenamedAttribute("choose_token")

    @property
    def takes_largest_logit(self) -> bool:
        """Whether the choice is the largest logit of the model: temperature 0 without biases and penalties."""
        return self.temperature == 0 and not self.bias and not self._penalises

    @property
    def _penalises(self) -> bool:
        return self.repeat_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def largest_logits_needed(self) -> int | None:
        """How many of the largest logits the choice reads, after biases and penalties; None if it may read all."""
        if self.temperature == 0:
            return 1
        return self.top_k if 0 < self.top_k <= MAX_PARTIAL_SORT else None

    def describe_choice(self, seed: int, tokens: Sequence[int], count: int) -> TokenChoice:
        """Return the sampling parameters for a device to choose the token at position ``count + 1`` of a text.

        The device has the token before it.

        Args:
            seed: The seed of the random numbers.
            tokens: The tokens of the text.
            count: Number of the first tokens of the text that are known here.
        """
        from ..inference.decoding.device_tokens import TokenChoice

        penalises, n = self._penalises and self.repeat_last_n != 0, self.repeat_last_n
        recent = tokens[max(0, count - n + 1) if n > 0 else 0 : count]
        counts = Counter(recent) if penalises else Counter[int]()
        biased = [token for token, _ in self.bias]
        return TokenChoice(
            self.top_k if self.temperature else 1,
            (
                *(self.temperature, self.top_p, self.min_p),
                *(self.repeat_penalty, self.presence_penalty, self.frequency_penalty),
                np.random.default_rng([seed, count + 1]).random() if self.temperature else 0.0,
            ),
            [*biased, *counts] if self.bias or penalises else None,
            [*(added for _, added in self.bias), *(0.0 for _ in counts)],
            [*(0 for _ in biased), *counts.values()],
            penalises,
        )

    def _select_recent_tokens(self, before: Sequence[int]) -> Sequence[int]:
        return before[max(0, len(before) - self.repeat_last_n) :] if self.repeat_last_n >= 0 else before

    def check_logit_bias_tokens(self, vocabulary: int) -> None:
        """Raise `ModelError` if a logit bias names a token outside of a vocabulary of `vocabulary` tokens."""
        for token, _ in self.bias:
            if not 0 <= token < vocabulary:
                raise ModelError(f"bias is for token {token}; need 0 to {vocabulary - 1}, as hocket tokenize prints")

    def choose_token(
        self, logits: npt.NDArray[np.float32], rng: np.random.Generator, before: Sequence[int] = ()
    ) -> int:
        """Choose the next token from logits, by the sampling options, and return its id.

        Args:
            logits: Logits [vocabulary].
            rng: The random numbers.
            before: Earlier tokens in order, for the penalties.

        Raises:
            ModelError: An argument is wrong, the largest logit is not finite, or all tokens are banned.
        """
        for name, value, kind in (
            ("logits", logits, LOGITS_KIND),
            ("rng", rng, RNG_KIND),
            ("before", before, TOKENS_KIND),
        ):
            require(ModelError, "Sampling.choose_token", name, value, kind)
        best = int(np.argmax(logits))  # the index of a NaN, if there is one
        require_finite_largest_logit(best, float(logits[best]))
        adjusted = self._apply_bias_and_penalties(logits, before)
        if self.temperature == 0:
            return best if adjusted is logits else int(np.argmax(adjusted))
        ids, filtered_logits = self.filter_tokens(adjusted)
        with np.errstate(over="ignore"):  # a very low temperature keeps only the first token
            sums = np.cumsum(softmax((filtered_logits - filtered_logits[0]) / self.temperature))
        return int(ids[np.searchsorted(sums / sums[-1], rng.random(), side="right")])  # as `rng.choice`, in 3 of 25 us

    def choose_candidate(
        self, candidates: TokenCandidates, rng: np.random.Generator, before: Sequence[int] = ()
    ) -> int:
        """Choose the token that `choose_token` chooses from all logits, and return its id.

        The candidates include all tokens that have a bias or a penalty, and `largest_logits_needed` further tokens with
        the largest logits. The choice has the same order of tokens, so it is the same.

        Raises:
            ModelError: As `choose_token`.
            HocketError: The mask of allowed tokens has failed.
        """
        if candidates.mask_error is not None:
            raise candidates.mask_error
        require_finite_largest_logit(*candidates.largest)
        ids, logits = candidates.list_in_token_order()
        changes = self
        if self.bias:
            places = np.searchsorted(ids, [token for token, _ in self.bias]).tolist()
            changes = replace(self, bias=tuple(zip(places, (added for _, added in self.bias), strict=True)))
        recent = np.searchsorted(ids, self._select_recent_tokens(before)).tolist() if self._penalises else ()
        return int(ids[changes.choose_token(logits, rng, recent)])

    def _apply_bias_and_penalties(
        self, logits: npt.NDArray[np.float32], before: Sequence[int]
    ) -> npt.NDArray[np.float32]:
        """Return the logits after the logit biases and the penalties of recent tokens.

        The result is a copy, or `logits` itself if there is nothing to apply.
        """
        penalises, recent = self._penalises, self._select_recent_tokens(before)
        if not self.bias and not (penalises and len(recent)):
            return logits
        adjusted = logits.copy()
        self.check_logit_bias_tokens(len(logits))
        for token, added in self.bias:
            adjusted[token] += np.float32(added)
        if penalises and len(recent):
            ids, counts = np.unique(_as_token_array(recent, len(logits)), return_counts=True)
            old = adjusted[ids]
            lowered = counts * np.float32(self.frequency_penalty) + np.float32(self.presence_penalty)
            with np.errstate(over="ignore"):  # a penalty never bans a token
                scaled = np.where(old > 0, old / np.float32(self.repeat_penalty), old * np.float32(self.repeat_penalty))
                adjusted[ids] = np.where(old > -np.inf, np.clip(scaled - lowered, -F32_MAX, F32_MAX), old)
        if adjusted.max() == -np.inf:
            raise ModelError("bias is -inf for every token that may come next; leave out one")
        return adjusted

    def filter_tokens(self, logits: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Return the tokens that pass the filters top-k, top-p and min-p, the most probable first; at least one passes.

        The first array has the token ids, the second one their logits.
        """
        is_partial = 0 < self.top_k <= MAX_PARTIAL_SORT and self.top_k < len(logits)
        ids = find_top_k(logits, self.top_k) if is_partial else argsort_descending(logits)[: self.top_k or None]
        filtered_logits = logits[ids].astype(np.float64)
        p = softmax(filtered_logits)
        count = int(np.searchsorted(np.cumsum(p), self.top_p)) + 1 if self.top_p < 1 else len(p)
        count = min(count, int(np.count_nonzero(p >= self.min_p * p[0])))
        return ids[:count], filtered_logits[:count]


def _as_token_array(tokens: Sequence[int], vocabulary: int) -> npt.NDArray[np.int64]:
    """Return tokens as an array; raises `ModelError` if one is no token of the vocabulary."""
    try:
        array = np.asarray(tokens)
    except ValueError:  # rows of different lengths
        array = np.empty((0, 0))
    if array.ndim != 1 or array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= vocabulary:
        raise ModelError(f"Sampling.choose_token: before has tokens of another kind; need 0 to {vocabulary - 1}")
    return array.astype(np.int64)


def require_finite_largest_logit(token: int, logit: float) -> None:
    """Raise `NonFiniteLogitError` unless the largest logit of a step, which `token` has, is finite."""
    if not math.isfinite(logit):
        raise NonFiniteLogitError(
            f"the model gives token {token} the logit {logit}; its file is damaged, fetch it again"
        )


def softmax(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    e = np.exp(x - x.max())
    return e / e.sum()
