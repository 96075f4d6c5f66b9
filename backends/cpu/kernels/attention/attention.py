"""Binding of attention to its kernels. A table with the addresses of each head makes all variants alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import numpy.typing as npt

from .....ops.reduction.norms import alibi_slopes
from ....base import contiguous_strides
from ....operands import Bound, Operand, float_bits
from ... import processor
from ...steps import SHARED, Share, Steps
from ..cells import CELLS
from ..products.products import stand_ins
from ..rows import UNARY_WORDS, rows_of, unary
from . import attention_few, attention_many, attention_tiled
from .attention_squares import takes
from .scores import OUT

FEW = 16
"""Fewest tokens for which lanes should be tokens (prefill kernel)."""
TOGETHER = 8
"""Largest number of heads of a group."""
LEAST = 256
"""Fewest keys for a split of the keys."""
LOG2_E = math.log2(math.e)

Addresses = npt.NDArray[np.int64]


def _at(x: Operand, axes: Sequence[tuple[int, npt.NDArray[np.int64]]]) -> Addresses:
    """Compute the addresses in `x` for all combinations of indices along `axes`. Indices wrap around at the size."""
    addresses = np.array(x.address, np.int64)
    for axis, index in axes:
        addresses = addresses[..., None] + x.dtype.bytes_of(x.strides[axis]) * (index % x.shape[axis])
    return addresses


def _dense(steps: Steps, purpose: str, x: Operand) -> Operand:
    """Return `x`, or a dense copy if the elements of its rows are strided. `purpose` names the scratch."""
    if x.shape[-1] == 1 or x.strides[-1] == 1 or not all(x.shape):
        return x
    memory = steps.scratch(f"attention {purpose}", x.tensor.spec.nbytes)
    copy = Operand(
        memory.address, replace(memory.tensor, shape=x.shape, strides=contiguous_strides(x.shape), dtype=x.dtype)
    )
    for leading in product(*map(range, x.shape[:-3])):
        source, target = _elements(x, leading), _elements(copy, leading)
        walk = rows_of(source.shape, [source, target], whole_rows=True)
        assert walk is not None
        steps.add(unary("copy"), UNARY_WORDS(walk=walk), reads=[source], writes=[target])
    return copy


def _elements(x: Operand, leading: Sequence[int]) -> Operand:
    """Return the part of `x` at fixed leading indices, with each element as a row of its own."""
    for axis, i in enumerate(leading):
        x = x.part(axis, i, 1)
    return replace(x, tensor=replace(x.tensor, shape=(*x.shape, 1), strides=(*x.strides, 1)))


def _heads(steps: Steps, call: Bound, q: Operand, k: Operand, v: Operand, mask: Operand | None) -> Addresses:
    """Build the table [sequences..., heads, 7 words] in the layout of `scores`."""
    *leading, _, heads, _ = q.shape
    keys, count = k.shape[-3], len(leading)
    outer = [(i, np.arange(n)) for i, n in enumerate(leading)]
    every, sinks = np.arange(heads), call.optional(4)
    group = every // (heads // k.shape[-2])
    if mask is None:
        seen = np.array(steps.constant(np.zeros(keys, np.float32)).address)
    else:
        own = call.attrs["mask_heads"] != "one"
        missing = count - (len(mask.shape) - 2 - own)
        axes = [(i - missing, index) for i, index in outer[missing:]]
        seen = _at(mask, [*axes, (len(axes), every)]) if own else _at(mask, axes)[..., None]
    slopes = [float_bits(slope * LOG2_E) for slope in alibi_slopes(heads, _number(call, "max_bias"))]
    none = np.full(1, -np.inf, np.float32)
    columns = (
        _at(q, [*outer, (count + 1, every)]),
        _at(k, [*outer, (count + 1, group)]),
        _at(v, [*outer, (count + 1, group)]),
        seen,
        _at(call.out, [*outer, (count + 1, every)]),
        np.array(slopes),
        np.array(steps.constant(none).address) if sinks is None else _at(sinks, [(0, every)]),
    )
    return np.stack(np.broadcast_arrays(*columns), -1).astype(np.int64)


def _number(call: Bound, name: str) -> float:
    """Return a number among the attributes as float."""
    return float(np.asarray(call.attrs[name]))


def _together(shared: int) -> int:
    """Choose the heads of a unit of work. They share a key head."""
    return max(n for n in range(1, TOGETHER + 1) if shared % n == 0)


def _cut(steps: Steps, walks: int, groups: int, k: Operand, v: Operand) -> tuple[int, int]:
    """Choose how the threads split the work of decode attention evenly.

    Groups of heads walk together if the keys of a token are adjacent: then memory is read front to back, which
    processors prefetch. Threads preferably share the groups rather than the keys, because then no partial results are
    combined.

    Args:
        steps: The steps of the program.
        walks: Sequences.
        groups: Groups of heads of a sequence.
        k: The keys.
        v: The values.

    Returns:
        The groups of heads that walk together, and the number of splits of the keys.
    """
    most = max(1, k.shape[-3] // LEAST) if k.tensor.spec.nbytes >= SHARED else 1
    parts = _parts(steps, walks)
    if all(x.shape[-2] * x.strides[-2] <= x.strides[-3] for x in (k, v)):
        if groups % parts == 0:
            return groups // parts, 1
        if most >= parts:
            return groups, parts
    return 1, min(most, _parts(steps, walks * groups))


def _parts(steps: Steps, units: int) -> int:
    """Compute the number of splits of each unit with which all threads have equal work."""
    return steps.threads // math.gcd(units, steps.threads)


def _is_read(x: Operand | None) -> bool:
    """Return whether kernels can read keys or values in place, or after a copy."""
    return x is not None and (x.is_float or (x.dtype in CELLS and x.is_dense_along(-1) and not x.is_packed))


def _attention(steps: Steps, call: Bound) -> bool:
    """Add attention steps: prefill kernels from `MIN_PREFILL_TOKENS` on, else decode; False if operands do not fit."""
    given, sinks, out = call.src[:4], call.optional(4), call.out
    floats = (call.operand(0), call.optional(3), sinks)
    if not all(x is None or x.is_float for x in floats) or not all(map(_is_read, given[1:3])):
        return False
    if not out.is_float or out.strides[-1] != 1:
        return False
    q, k, v, mask = (x and _dense(steps, n, x) for n, x in zip(("q", "k", "v", "mask"), (*given, None), strict=False))
    assert q is not None
    assert k is not None
    assert v is not None
    *leading, tokens, heads, size = q.shape
    keys, width, shared = k.shape[-3], v.shape[-1], _together(heads // k.shape[-2])
    units = math.prod(leading) * heads // shared
    cap, scale = _number(call, "softcap"), _number(call, "scale")
    addresses = _heads(steps, call, q, k, v, mask)
    common = {
        "tokens": tokens,
        "units": units,
        "shared": shared,
        "keys": keys,
        "size": size,
        "width": width,
        "q_step": 4 * q.strides[len(leading)],
        "k_step": k.dtype.bytes_of(k.strides[len(leading)]),
        "v_step": v.dtype.bytes_of(v.strides[len(leading)]),
        "mask_step": 4 * mask.strides[-2] if mask else 0,
        "out_step": 4 * out.strides[len(leading)],
        "factor": float_bits(scale / cap if cap else scale * LOG2_E),
        "cap": float_bits(cap * LOG2_E),
        "heads": steps.constant(addresses).address,
    }
    reads = [x for x in (q, k, v, mask, sinks) if x is not None]
    if tokens >= FEW:
        many = attention_tiled if processor.tiles() and takes(k.dtype, v.dtype) else attention_many
        span = attention_many.span(many.JOBS, units, shared, tokens, steps.threads)
        each = many.scratch_bytes(shared * span, size, width)
        scratch = steps.scratch("attention", each * steps.threads)
        kernel = many.attend(k.dtype, v.dtype)
        common |= {"scratch": scratch.address, "scratch_bytes": each}

        def share(tickets: int) -> Share:
            return Share(attention_many.ARGS(**common, span=span, tickets=tickets), reads, [out, scratch])

        if steps.is_shared(reads, [out]):
            steps.add_pieces(kernel, share)
        else:
            steps.deal(kernel, [share(0)])
        return True
    beside, chunks = _cut(steps, math.prod(leading), heads // shared, k, v)
    rows = tokens * shared
    each = attention_few.scratch_bytes(rows * beside, keys, size, width)
    parts = steps.scratch("attention parts", units * rows * chunks * attention_few.part_bytes(width))
    scratch = steps.scratch("attention", each * steps.threads)
    common |= {"scratch": scratch.address, "scratch_bytes": each}
    common |= {"partial": parts.address, "chunks": chunks, "beside": beside}
    words = attention_few.ARGS(**common)
    writes = [parts, scratch, out] if chunks == 1 else [parts, scratch]
    steps.add(attention_few.attend(k.dtype, v.dtype), words, reads=reads, writes=writes)
    if chunks > 1:
        _join(steps, call, common, addresses, [parts, *([sinks] if sinks else [])], scratch)
    return True


def _join(
    steps: Steps, call: Bound, common: Mapping[str, int], heads: Addresses, reads: Sequence[Operand], scratch: Operand
) -> None:
    """Add the step that combines the partial results. Each thread does all of it if only products follow."""
    own = stand_ins(steps, call)
    if own is None:
        steps.add(attention_few.join, attention_few.ARGS(**common), reads=reads, writes=[call.out, scratch])
        return

    def share(thread: int, out: Operand) -> Share:
        moved = heads.copy()
        moved[..., OUT // 8] += out.address - call.out.address
        own_scratch = common["scratch"] + thread * common["scratch_bytes"]
        words = {**common, "heads": steps.constant(moved).address, "scratch": own_scratch}
        return Share(attention_few.ARGS(**words), reads, [out])

    steps.deal(attention_few.join, [share(thread, out) for thread, out in enumerate(own)])
    steps.stand_in(own, call.out)


BINDINGS = {"attention": _attention}
