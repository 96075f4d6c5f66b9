"""Arrays that callers give for leaves: the one check of numbers that come from outside."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import HocketError, PlanError
from .spec import Spec

NUMBERS, INTEGERS = "biuf", "iu"
"""NumPy's kinds of dtypes that hold real numbers, and integers."""


def as_number_array(what: str, given: npt.ArrayLike, error: type[HocketError] = PlanError) -> npt.NDArray[Any]:
    """`given` as an array of real numbers.  Raises `error`, which calls it `what`."""
    try:
        array = np.asarray(given)
    except Exception as why:  # what is not an array may raise anything
        reason = " ".join(f"{type(why).__name__}: {why}".split())
        raise error(f"{what}: got a {type(given).__name__} that NumPy makes no array of ({reason:.100})") from None
    if array.dtype.kind not in NUMBERS:
        raise error(f"{what} has NumPy dtype {array.dtype}; it must be real numbers")
    return array


def as_array_for_spec(
    what: str, given: npt.ArrayLike, spec: Spec, error: type[HocketError] = PlanError
) -> npt.NDArray[Any]:
    """`given` as an array of numbers that `spec` can hold, in whatever dtype it came; bf16 may come as its bits.

    Raises `error` for another shape, for what are no real numbers, for floats where integers are needed, and for
    integers that do not fit.  An array that has the dtype already costs a microsecond.
    """
    if type(given) is np.ndarray and given.shape == spec.shape and given.dtype is spec.dtype.storage:
        return given
    array = as_number_array(what, given, error)
    if array.shape != spec.shape:
        raise error(f"{what}: got shape {list(array.shape)}, need {spec}")
    if not spec.dtype.is_integer or not array.size:
        return array
    if array.dtype.kind not in INTEGERS:
        raise error(f"{what}: got {array.dtype}, need {spec}; round and convert it first")
    if not np.can_cast(array.dtype, spec.dtype.storage):
        low, high, legal = array.min(), array.max(), np.iinfo(spec.dtype.storage)
        if low < legal.min or high > legal.max:
            raise error(f"{what}: got integers from {low} to {high}, need {spec}: {legal.min} to {legal.max}")
    return array


def as_block_bytes(what: str, given: npt.ArrayLike, spec: Spec) -> npt.NDArray[Any]:
    """`given` as the bytes of a quantised value, uint8 ``[..., bytes of a row]``.  Raises `PlanError` unless these are
    as many bytes as `spec` has."""
    array = as_number_array(what, given)
    if array.dtype.kind not in INTEGERS or array.dtype.itemsize != 1 or array.nbytes != spec.nbytes:
        got = f"{array.dtype}{list(array.shape)}"
        raise PlanError(f"{what}: got {got}, need {spec}: {spec.nbytes} bytes of its blocks, as uint8")
    row = spec.shape[-1] // spec.dtype.block * spec.dtype.block_bytes
    return array.view(np.uint8).reshape(*spec.shape[:-1], row)
