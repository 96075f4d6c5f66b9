"""When arrays count as equal: to the bit, element by element, or by the largest of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def assert_equal_bits(got: npt.ArrayLike, want: npt.ArrayLike) -> None:
    np.testing.assert_array_equal(got, np.asarray(want))


def assert_elements_close(got: npt.ArrayLike, want: npt.ArrayLike, rtol: float = 1e-12, atol: float = 0.0) -> None:
    """Each element is."""
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(want), rtol=rtol, atol=atol)


def assert_close_to_largest(got: npt.ArrayLike, want: npt.ArrayLike, limit: float = 1e-12) -> None:
    """No element is off by more than `limit` of the largest, or of one if all are smaller."""
    x, y = np.asarray(got), np.asarray(want)
    assert x.shape == y.shape
    if x.size:
        assert np.max(np.abs(x - y)) <= limit * max(1.0, np.max(np.abs(y)))
