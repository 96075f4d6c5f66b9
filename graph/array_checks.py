"""Checks of the arrays that callers bind to inputs, weights and states of a graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import HocketError, PlanError, format_count
from .spec import Spec

NUMBERS, INTEGERS = "biuf", "iu"
"""The `kind` letters of NumPy dtypes for real numbers, and for integers."""


def as_real_number_array(subject: str, data: npt.ArrayLike, error: type[HocketError] = PlanError) -> npt.NDArray[Any]:
    """Return `data` as a NumPy array of real numbers, or raise `error`.

    Args:
        subject: The name of the array at the start of an error message.
        data: The numbers.
        error: The class of the error.

    Raises:
        HocketError: `data` has entries that are not real numbers; the class is `error`.
    """
    try:
        array = np.asarray(data)
    except Exception as why:  # `__array__` of a foreign class may raise anything
        reason = " ".join(f"{type(why).__name__}: {why}".split())
        raise error(f"{subject}: got a {type(data).__name__}, need an array of numbers ({reason:.100})") from None
    if array.dtype.kind not in NUMBERS:
        raise error(f"{subject} has NumPy dtype {array.dtype}; it must be real numbers")
    return array


def as_array_for_spec(
    subject: str, data: npt.ArrayLike, spec: Spec, error: type[HocketError] = PlanError
) -> npt.NDArray[Any]:
    """Return `data` as an array, if it has the shape of `spec` and only numbers that the dtype of `spec` can hold.

    The array keeps its own dtype. A call takes one microsecond for an array that fits.

    Args:
        subject: The name of the array at the start of an error message.
        data: The numbers. The bits of bf16 numbers as uint16 are allowed too.
        spec: The shape and the dtype of the leaf.
        error: The class of the error.

    Raises:
        HocketError: The shape differs, a number is not an integer, or an integer does not fit into the dtype. The
            class is `error`.
    """
    if type(data) is np.ndarray and data.shape == spec.shape and data.dtype is spec.dtype.storage:
        return data
    array = as_real_number_array(subject, data, error)
    if array.shape != spec.shape:
        raise error(f"{subject}: got shape {list(array.shape)}, need {spec}")
    if not spec.dtype.is_integer or not array.size:
        return array
    if array.dtype.kind not in INTEGERS:
        raise error(f"{subject}: got {array.dtype}, need {spec}; round and convert it first")
    if not np.can_cast(array.dtype, spec.dtype.storage):
        low, high, limits = array.min(), array.max(), np.iinfo(spec.dtype.storage)
        if low < limits.min or high > limits.max:
            raise error(f"{subject}: got integers from {low} to {high}, need {spec}: {limits.min} to {limits.max}")
    return array


def as_block_bytes(subject: str, data: npt.ArrayLike, spec: Spec) -> npt.NDArray[Any]:
    """Return `data` as the bytes of the quantisation blocks of a value: uint8 ``[..., bytes of a row]``.

    Raises:
        PlanError: An element of `data` has more than one byte, or the number of bytes differs from `spec`.
    """
    array = as_real_number_array(subject, data)
    if array.dtype.kind not in INTEGERS or array.dtype.itemsize != 1 or array.nbytes != spec.nbytes:
        got = f"{array.dtype}{list(array.shape)}"
        raise PlanError(
            f"{subject}: got {got}, need {spec}: {format_count(spec.nbytes, 'byte')} of its blocks, as uint8"
        )
    row = spec.shape[-1] // spec.dtype.block * spec.dtype.block_bytes
    return array.view(np.uint8).reshape(*spec.shape[:-1], row)
