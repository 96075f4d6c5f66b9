"""The random values of operands: one generator for each input kind, within the legal values of the op.

A quantised operand has random blocks for all kinds. Arrays have one entry per unit: an element or a whole block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

import numpy as np

from ...graph.dtypes import DType
from ...graph.errors import GraphError
from ...graph.spec import Spec
from ...ops import Op
from ...ops.declaration.samples import LegalRange
from ...ops.elementwise.binary import round_to_dtype
from ...ops.quantisation import dequantise, f32_to_bf16
from .case import Case
from .grow_shapes import count_axes_with_distinct_ids
from .operand_layouts import (
    Array,
    compute_shape_in_units,
    find_in_place_operand_and_duplicate,
    find_layout_or_contiguous,
)

LARGE_MAGNITUDES: Mapping[DType, float] = {DType.F16: 2e3}
"""Standard deviation of numbers of kind ``large``; 1e4 for other dtypes. Squares and sums of them are still finite."""


NAN_SHARE = 0.1
"""Fraction of NaN elements of kind ``nan``. Even for ops that sum rows, most results are then numbers."""
SUBNORMAL: Mapping[DType, float] = {DType.F16: 6e-8}
"""The distance of the generated subnormal numbers; 1e-39 for other dtypes."""
SUBNORMAL_STEPS = (1, 9)
"""The subnormal numbers of kind ``special`` in steps, with either sign; kind ``denormal`` has up to 90 steps."""


class NoReference(Exception):  # noqa: N818  (an outcome, not an error)
    """The conformance kit has no float64 reference for this case."""


def list_legal_infinities_by_operand(op: Op) -> dict[str, tuple[float, ...]]:
    """Return, for each operand that may be infinite, its legal infinities: the negative one, or both."""
    return {name.lstrip("-"): (-np.inf,) if name.startswith("-") else (np.inf, -np.inf) for name in op.infinite}


def has_unquantised_floats(spec: Spec) -> bool:
    """Return whether an operand has float elements outside quantisation blocks, which may be NaN or infinite."""
    return not spec.dtype.is_integer and not spec.dtype.is_quantised and spec.size > 0


def select_relevant_input_kinds(case: Case) -> tuple[str, ...]:
    """Return the input kinds that make a difference for the operands of `case`. ``normal`` comes first."""
    specs = case.specs
    if not any(s.size for s in specs.values()):
        return ("normal",)
    kinds = ["normal"]
    if any(s.size > 1 and not s.dtype.is_quantised for s in specs.values()):
        kinds += ["ties", "constant"]
    if any(not s.dtype.is_integer and not s.dtype.is_quantised for s in specs.values()):
        kinds += ["uniform", "large", "denormal", "zeros"]
    if any(name in specs for name in list_legal_infinities_by_operand(case.op_declaration)):
        kinds.append("infinities")
    if any(map(has_unquantised_floats, specs.values())):
        kinds += ["nan", "special"]
    return tuple(kinds)


def generate_random_operands(case: Case) -> dict[str, Array]:
    """Return random operands of `case` by name.

    They have one entry per unit (an element or a whole block). Entries are float64 values that the dtype represents,
    integers, or the bytes of quantised blocks.
    """
    rng = np.random.default_rng(case.random_seed)
    op, specs = case.op_declaration, case.specs
    sizes, attrs = case.dimension_sizes, case.attributes_with_defaults
    operands = {}
    for name, spec in specs.items():
        legal, differ = op.ranges.get(name), count_axes_with_distinct_ids(op, attrs, name)
        if spec.dtype.is_quantised:
            array = _generate_blocks_of_small_values(spec, rng)
        elif spec.dtype.is_integer:
            array = _generate_integers(spec, legal, differ, sizes, case.inputs, rng)
        else:
            array = _generate_floats(spec, legal, case.inputs, list_legal_infinities_by_operand(op).get(name, ()), rng)
            if case.inputs == "nan" and has_unquantised_floats(spec):
                array = np.where(rng.random(spec.shape) < NAN_SHARE, np.nan, array)
            if case.inputs == "special" and has_unquantised_floats(spec):
                array = _insert_specials_in_half_or_rows(
                    array, make_infinities_zeros_and_subnormals(op, name, spec.dtype), spec, op.signed_zeros, rng
                )
        tied = find_layout_or_contiguous(spec, case.layout, differ).broadcast_axis
        if tied is not None:
            array = np.repeat(np.take(array, [0], axis=tied), array.shape[tied], axis=tied)
        operands[name] = array
    if case.layout in ("twin", "overlap"):
        one, other = find_in_place_operand_and_duplicate(op, specs, case.attributes_with_defaults) or ("", "")
        shifted = np.append(operands[one].reshape(-1)[1:], operands[other].reshape(-1)[-1:])
        operands[other] = operands[one] if case.layout == "twin" else shifted.reshape(operands[one].shape)
    return operands


def as_reference_array(units: Array, spec: Spec) -> Array:
    """Return an operand as the reference needs it: float64 or integers; quantised blocks are dequantised."""
    if not spec.dtype.is_quantised:
        return units
    return dequantise(as_block_bytes(units, spec), spec.dtype).astype(np.float64)


def as_block_bytes(units: Array, spec: Spec) -> Array:
    """Return the quantised blocks `units` as rows of bytes, as in a model file: uint8 ``[..., row bytes]``."""
    width = spec.shape[-1] // spec.dtype.block * spec.dtype.block_bytes
    return np.ascontiguousarray(units).view(np.uint8).reshape(*spec.shape[:-1], width)


def as_stored_weight(units: Array, spec: Spec) -> Array:
    """Convert a generated operand to the storage format of a weight.

    That is the storage dtype of NumPy, uint16 bits for bf16, or rows of block bytes.
    """
    if spec.dtype.is_quantised:
        return as_block_bytes(units, spec)
    if spec.dtype is DType.BF16:
        return f32_to_bf16(units.astype(np.float32))
    return units.astype(spec.dtype.storage)


@cache
def can_dequantise(dtype: DType) -> bool:
    """Return whether the kit can dequantise blocks of this dtype."""
    try:
        dequantise(np.zeros((1, dtype.block_bytes), np.uint8), dtype)
    except GraphError:
        return False
    return True


def _generate_blocks_of_small_values(spec: Spec, rng: np.random.Generator) -> Array:
    """Generate random quantised blocks; blocks that have a value of magnitude 8 or more, or NaN, are replaced.

    Raises:
        NoReference: the dtype has no dequantiser.
    """
    dtype = spec.dtype
    if not can_dequantise(dtype):
        raise NoReference(f"there is no dequantiser for {dtype}")
    shape = compute_shape_in_units(spec)
    raw = rng.integers(0, 256, (int(np.prod(shape)), dtype.block_bytes), np.uint8)
    for attempt in range(40):
        values = dequantise(raw, dtype)
        wild = ~(np.abs(values) < 8.0).all(-1)
        if not wild.any():
            break
        # Small bytes give small exponents, wherever the type keeps its scale; zeros are the last resort.
        high = 256 if attempt < 30 else 64 if attempt < 38 else 1
        raw[wild] = rng.integers(0, high, (int(wild.sum()), dtype.block_bytes), np.uint8)
    else:
        raw[~(np.abs(dequantise(raw, dtype)) < 8.0).all(-1)] = 0
    return np.ascontiguousarray(raw).view(np.dtype((np.void, dtype.block_bytes))).reshape(shape)


def _generate_integers(
    spec: Spec, legal: LegalRange | None, differ: int, sizes: Mapping[str, int], kind: str, rng: np.random.Generator
) -> Array:
    """Generate random integers of input kind `kind` within the legal values, distinct over the last `differ` axes."""
    dtype = spec.dtype.storage
    if legal is None:
        limit = {"large": np.iinfo(dtype).max, "constant": 3, "ties": 3}.get(kind, min(100, np.iinfo(dtype).max))
        random_values = rng.integers(-limit, limit, spec.shape, np.int64, endpoint=True)
        return (np.full(spec.shape, 7) if kind == "constant" else random_values).astype(dtype)
    low = int(legal.low)
    high = int(legal.high) + 1 if not isinstance(legal.high, str) else sizes[legal.high]
    if differ:
        run = math.prod(spec.shape[len(spec.shape) - differ :])
        runs = [low + rng.permutation(high - low)[:run] for _ in range(spec.size // max(1, run))]
        return np.array(runs, np.int64).reshape(spec.shape).astype(dtype)
    if kind == "constant" and high > low:
        return np.full(spec.shape, high - 1, dtype)
    if kind == "ties":
        high = min(high, low + 2)
    return rng.integers(low, max(high, low + 1), spec.shape).astype(dtype)


def make_infinities_zeros_and_subnormals(op: Op, operand: str, dtype: DType) -> Array:
    """Return the special values of a float operand: both infinities, both zeros and subnormal numbers.

    Zeros and subnormal numbers are left out if the op has sums and 0 is no legal value of the operand. A sum of
    quotients by tiny numbers would be a rounding error.
    """
    step = SUBNORMAL.get(dtype, 1e-39)
    rounded_dtype = DType.F32 if dtype is DType.F64 else dtype
    legal = op.ranges.get(operand)
    if legal and not op.signed_zeros and not legal.low <= 0.0 <= float(legal.high):
        return np.array([np.inf, -np.inf])
    above = np.array([np.inf, 0.0, *(n * step for n in SUBNORMAL_STEPS)])
    return np.asarray(round_to_dtype(np.concatenate([above, -above]), rounded_dtype), np.float64)


def _insert_specials_in_half_or_rows(
    values: Array, special: Array, spec: Spec, everywhere: bool, rng: np.random.Generator
) -> Array:
    """Insert special values into half of the entries, or into one entry of each row if not `everywhere`.

    Every special value occurs if there are enough entries.
    """
    special = rng.permutation(special)
    flat = values.reshape(-1).copy()
    if everywhere or not spec.shape:
        at = rng.permutation(spec.size)[: max(spec.size // 2, special.size)]
    else:
        columns = spec.shape[-1]
        at = np.arange(0, spec.size, columns) + rng.integers(columns, size=spec.size // columns)
    flat[at] = np.resize(special, at.size)
    return flat.reshape(spec.shape)


def _generate_floats(
    spec: Spec, legal: LegalRange | None, kind: str, infinite: tuple[float, ...], rng: np.random.Generator
) -> Array:
    """Generate random floats of input kind `kind` within the legal values.

    They are float64 values that the dtype represents.
    """
    low, high = (float(legal.low), float(legal.high)) if legal else (-np.inf, np.inf)
    bounded = np.isfinite(low)
    values: Array
    shape = spec.shape
    if kind == "ties":
        values = rng.integers(-5, 6, shape) / 2.0
    elif kind == "large":
        top = LARGE_MAGNITUDES.get(spec.dtype, 1e4)
        values = rng.choice([low, high], shape) if bounded else rng.standard_normal(shape) * top
    elif kind == "denormal":
        values = rng.integers(-90, 91, shape) * SUBNORMAL.get(spec.dtype, 1e-39)
    elif kind == "special":  # between which infinities stand, and no product of many vanishes
        values = rng.choice([-1.0, 1.0], shape) * 2.0 ** rng.uniform(-1.0, 1.0, shape)
    elif kind == "uniform":
        values = rng.uniform(low, high, shape) if bounded else rng.uniform(-1.0, 1.0, shape)
    else:
        values = rng.uniform(low, high, shape) if bounded else rng.standard_normal(shape)
    if kind == "zeros":
        values = np.where(rng.random(shape) < 0.5, np.where(rng.random(shape) < 0.5, 0.0, -0.0), values)
    if kind == "constant" and shape and spec.size:
        values = np.broadcast_to(values[..., :1], shape)
    # A backend may keep f64 in f32, so no more digits than that.
    rounding_dtype = DType.F32 if spec.dtype is DType.F64 else spec.dtype
    values = np.asarray(round_to_dtype(np.clip(values, low, high), rounding_dtype), np.float64)
    if kind == "infinities" and infinite and spec.size:
        values = np.where(rng.random(shape) < 0.3, rng.choice(infinite, shape), values)
        if shape:
            values.reshape(-1, shape[-1])[0] = infinite[-1]  # a row of nothing else
    return values
