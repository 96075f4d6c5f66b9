"""The choice of a token from candidate logits, and the mask of a grammar, as decode steps need them.

Probabilities are float64. Each operation is rounded to the nearest float64, and the exponential consists of such
operations (`compute_exponential`). So every backend computes equal bits, and chooses the same token.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ...graph.errors import format_count
from ..declaration.op import Array, op
from ..declaration.samples import LegalRange, expand_template

Float64Array = npt.NDArray[np.float64]
SAMPLING_NUMBERS = (
    *("temperature", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty"),
    "uniform",
)
"""The float64 numbers of a choice in the order of the operand `numbers` of `sample_token`."""
LN2_HIGH, LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
"""ln 2 as a sum. Products of the first part with integers up to 2^20 are exact. Source: fdlibm ``e_exp.c``, 2004."""
MIN_EXPONENT = -708.0
"""Smaller exponents give 0, because the result would be subnormal."""
EXPONENTIAL_SERIES = tuple(1.0 / math.factorial(n) for n in range(14))
"""The Taylor coefficients of the exponential. The remainder is below 2^-57 for arguments up to ln 2 / 2."""
FLOAT64_BITS_RANGE = LegalRange(
    int(np.float64(0.25).view(np.int64)), int(np.float64(math.nextafter(1.0, 0.0)).view(np.int64))
)
"""The bits of float64 numbers from 0.25 to 1, which are legal for all `SAMPLING_NUMBERS`."""
F32_MAX = float(np.finfo(np.float32).max)


def compute_exponential(x: Float64Array) -> Float64Array:
    """Return exp(x) for ``x <= 0`` by rounded sums and products alone, in a fixed order, within 1.5 units of 2^-53.

    Cody and Waite, 1980: ``exp(x) = 2^k exp(r)`` with ``r = x - k ln 2``, and the Taylor series of exp(r).
    """
    bounded = np.maximum(x, MIN_EXPONENT)
    k = np.rint(bounded * (1.0 / math.log(2.0)))
    r = (bounded - k * LN2_HIGH) - k * LN2_LOW
    series = np.full_like(r, EXPONENTIAL_SERIES[-1])
    for coefficient in EXPONENTIAL_SERIES[-2::-1]:
        series = series * r + coefficient
    return np.where(x < MIN_EXPONENT, 0.0, np.ldexp(series, k.astype(np.int32)))


def _compute_probabilities(x: Float64Array) -> Float64Array:
    """Return the softmax of numbers in descending order, summed from the first to the last."""
    e = compute_exponential(x - x[0])
    return e / np.cumsum(e)[-1]


def _sample_rank(logits: Float64Array, numbers: dict[str, float]) -> int:
    """Sample one of several descending logits by temperature, top-p and min-p; return its position."""
    temperature, top_p = numbers["temperature"], numbers["top_p"]
    if logits.size == 1 or not temperature or not math.isfinite(logits[0]):
        return 0
    p = _compute_probabilities(logits)
    count = int(np.count_nonzero(np.cumsum(p) < top_p)) + 1 if top_p < 1 else p.size
    count = min(count, int(np.count_nonzero(p >= numbers["min_p"] * p[0])))
    sums = np.cumsum(_compute_probabilities((logits[:count] - logits[0]) / temperature))
    return min(int(np.count_nonzero(sums / sums[-1] <= numbers["uniform"])), count - 1)


def _apply_biases_and_penalties(logit: float, bias: Array, occurrences: int, numbers: dict[str, float]) -> float:
    """Add the biases of a token to its logit in order, then apply the penalties of its recent occurrences."""
    changed = np.float32(logit)
    for added in bias.astype(np.float32):
        changed += added
    if not occurrences or changed == -np.inf:
        return float(changed)
    penalty = np.float32(numbers["repeat_penalty"])
    scaled = float(changed / penalty if changed > 0 else changed * penalty)
    lowered = occurrences * float(np.float32(numbers["frequency_penalty"])) + float(
        np.float32(numbers["presence_penalty"])
    )
    return float(np.float32(min(max(scaled - lowered, -F32_MAX), F32_MAX)))


def _sample_row(logits: Array, ids: Array, limit: int, numbers: Array, bias: Array, occurrences: Array) -> int:
    values = dict(zip(SAMPLING_NUMBERS, numbers.astype(np.int64).view(np.float64).tolist(), strict=True))
    first_changed = ids.size - bias.size
    tokens, first = np.unique(ids, return_index=True)
    changed = logits[first].astype(np.float32).astype(np.float64)
    for i in np.flatnonzero(np.isin(tokens, ids[first_changed:])):
        own = ids[first_changed:] == tokens[i]
        changed[i] = _apply_biases_and_penalties(changed[i], bias[own], int(occurrences[own].sum()), values)
    changed = np.where(np.isnan(changed), -np.inf, changed)
    order = np.argsort(-changed, kind="stable")[: max(limit, 1)]
    return int(tokens[order[_sample_rank(changed[order], values)]])


def _check_sizes(n: int, s: int, m: int = 0, **_: object) -> str | None:
    if s != len(SAMPLING_NUMBERS):
        return f"numbers has {format_count(s, 'entry', 'entries')}; it must have {len(SAMPLING_NUMBERS)}"
    return (
        f"there are {format_count(n, 'candidate')} and changes of {m}; need at least 1 candidate, and no more changes"
        * (not n or m > n)
        or None
    )


@op(
    "logits[..., *n]: f32, ids[..., *n]: i32, limit[...]: i32, numbers[..., *s]: i64, "
    "bias[..., *m]?: f32, occurrences[..., *m]?: i32 -> [...]: i32",
    check=_check_sizes,
    flops=lambda n, **_: n * n,
    ranges={"ids": LegalRange(0, 2**20), "limit": LegalRange(1, 256), "numbers": FLOAT64_BITS_RANGE}
    | {"occurrences": LegalRange(0, 3)},
    samples=(
        *expand_template(
            "logits=f32[{b}{n}], ids=i32[{b}{n}], limit=i32[{l}], numbers=i64[{b}7]", b=("3,",), n=(1, 7, 64), l=("3",)
        ),
        "logits=f32[64], ids=i32[64], limit=i32[], numbers=i64[7]",
        "logits=f32[2,129], ids=i32[2,129], limit=i32[2], numbers=i64[2,7], bias=f32[2,65], occurrences=i32[2,65]",
        "logits=f32[0,4], ids=i32[0,4], limit=i32[0], numbers=i64[0,7], bias=f32[0,1], occurrences=i32[0,1]",
    ),
    errors=(
        ("logits=f32[4], ids=i32[4], limit=i32[], numbers=i64[6]", "numbers has 6 entries"),
        ("logits=f32[0], ids=i32[0], limit=i32[], numbers=i64[7]", "need at least 1 candidate"),
        ("logits=f32[4], ids=i64[4], limit=i32[], numbers=i64[7]", "ids is i64"),
    ),
    compare="exact",
    is_required=False,
)
def sample_token(
    logits: Array,
    ids: Array,
    limit: Array,
    numbers: Array,
    bias: Array | None = None,
    occurrences: Array | None = None,
) -> Array:
    """Sample a token of each row of candidates by bias, penalties, top-k, top-p, min-p and temperature, in this order.

    A candidate has a token in `ids` and its logit. A token that occurs several times is one candidate. `limit` is the
    k of top-k. `numbers` has the bits of float64 numbers: temperature, top_p, min_p, the penalties for repetition,
    presence and frequency, and a number from 0 to 1 that selects the token. `bias` and `occurrences` belong to the
    last candidates: biases are added to the logit of the token, and each occurrence is one among the recent tokens. A
    NaN counts as -inf. llama.cpp: ``llama_sampler_chain``, 2024.
    """
    lead = logits.shape[:-1]
    chosen = np.empty(lead, np.int32)
    none = np.zeros(next((part.shape for part in (bias, occurrences) if part is not None), (*lead, 0)))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for i in np.ndindex(lead):
            chosen[i] = _sample_row(
                logits[i],
                ids[i],
                int(limit[i]),
                numbers[i],
                *((none if part is None else part)[i] for part in (bias, occurrences)),
            )
    return chosen


@op(
    "x[..., *v], bits[..., *w]: i32 -> [..., v]",
    check=lambda v, w, **_: (
        f"bits has {format_count(w, 'word')} for {format_count(v, 'entry', 'entries')}; need {-(-v // 32)}"
        if w != -(-v // 32)
        else None
    ),
    inplace="x",
    ranges={"bits": LegalRange(-(2**31), 2**31 - 1)},
    samples=(
        *expand_template("x=f32[{n}], bits=i32[{w}]", n=(33,), w=(2,)),
        *("x=f32[3,64], bits=i32[3,2]", "x=f32[2,2,1], bits=i32[2,2,1]", "x=f32[0,5], bits=i32[0,1]"),
        "x=f32[2,100], bits=i32[2,4]",
    ),
    errors=(
        ("x=f32[33], bits=i32[1]", "bits has 1 word for 33 entries; need 2"),
        ("x=i32[3], bits=i32[1]", "x is i32"),
    ),
    compare="exact",
    infinite=("x",),
    is_required=False,
)
def mask_bits(x: Array, bits: Array) -> Array:
    """Replace the entries of `x` by -inf if their bit is 0: bit ``i % 32`` of word ``i // 32``. llguidance, 2025."""
    words = np.ascontiguousarray(bits.astype(np.int32)).view(np.uint8)
    words = words.reshape(*bits.shape[:-1], 4 * bits.shape[-1])
    return np.where(np.unpackbits(words, axis=-1, bitorder="little")[..., : x.shape[-1]] != 0, x, -np.inf)
