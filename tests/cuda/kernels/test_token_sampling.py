"""The choice of a token on an emulated device: equal to the reference and to the host, for every setting and seed."""

from __future__ import annotations

import numpy as np
import pytest

from hocket import ops
from hocket.backends.cupy.backend import DriverBackend
from hocket.backends.cupy.emulation.emulated_driver import EmulatedDriver
from hocket.graph import DType, Graph, Value, input
from hocket.ops.reduction.token_sampling import SAMPLING_NUMBERS, compute_exponential
from hocket.scheduler import load, plan_for_group

from ...given.devices.emulation import needs_compiler

SAMPLED_ROWS = 40
Arrays = dict[str, np.ndarray]


def make_choices(rng: np.random.Generator, rows: int, count: int, changed: int) -> Arrays:
    """Make candidates with ties, tokens that occur several times, infinities and NaN, and settings of all kinds."""
    logits = rng.normal(0, 3, (rows, count)).astype(np.float32)
    tied = np.round(logits)
    logits = np.where(rng.random((rows, 1)) < 0.3, tied, logits)
    special = np.array([np.nan, -np.inf, -0.0, 0.0, np.inf], np.float32)
    logits = np.where(rng.random(logits.shape) < 0.02, rng.choice(special, logits.shape), logits)
    numbers = np.empty((rows, len(SAMPLING_NUMBERS)))
    for row in numbers:
        row[:] = (
            rng.choice([0, 1e-3, 0.7, 1, 3]),
            rng.choice([1, 0.95, 0.5, 1e-6]),
            rng.choice([0, 0.05, 0.5, 0.999]),
            rng.choice([1, 1.1, 0.5]),
            rng.choice([0, 0.1, -2]),
            rng.choice([0, 0.3, -1e30, 1e30]),
            rng.random(),
        )
    arrays = {
        "logits": logits,
        "ids": rng.integers(0, 4 * count, (rows, count)).astype(np.int32),
        "limit": rng.choice([1, 2, 40, 256], rows).astype(np.int32),
        "numbers": numbers.view(np.int64),
    }
    if changed:
        bias = rng.choice([0, 1.5, -np.inf, 1e30, -1e30], (rows, changed), p=[0.6, 0.1, 0.1, 0.1, 0.1])
        arrays |= {"bias": bias.astype(np.float32), "occurrences": rng.integers(0, 3, (rows, changed)).astype(np.int32)}
    return arrays


def leaf(name: str, array: np.ndarray) -> Value:
    return input(name, array.shape, DType(array.dtype))


@needs_compiler
@pytest.mark.parametrize(("count", "changed"), [(1, 0), (64, 0), (128, 65), (33, 33), (512, 257), (1024, 300)])
def test_a_device_samples_the_token_of_the_reference(count: int, changed: int) -> None:
    rng = np.random.default_rng(count)
    rows = SAMPLED_ROWS if count < 512 else 4
    arrays = make_choices(rng, rows, count, changed)
    node = ops.sample_token(*(leaf(name, array) for name, array in arrays.items()))
    backend = DriverBackend(EmulatedDriver())
    run = load(plan_for_group(Graph({"y": node}), [(backend, backend.device(0))]), {})
    expected = ops.sample_token.reference(**arrays)
    assert len(set(expected.tolist())) > rows // 4 or count == 1
    for _ in range(4):  # other orders of threads
        np.testing.assert_array_equal(run.run(arrays)["y"], expected)


@needs_compiler
def test_a_device_masks_the_entries_without_a_bit() -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(0, 1, (3, 1001)).astype(np.float32)
    x[:, 5] = np.nan
    bits = rng.integers(-(2**31), 2**31, (3, 32)).astype(np.int32)
    node = ops.mask_bits(leaf("x", x), leaf("bits", bits))
    backend = DriverBackend(EmulatedDriver())
    run = load(plan_for_group(Graph({"y": node}), [(backend, backend.device(0))]), {})
    is_set = np.array([[bits[i, c // 32] >> c % 32 & 1 for c in range(1001)] for i in range(3)], bool)
    np.testing.assert_array_equal(run.run({"x": x, "bits": bits})["y"], np.where(is_set, x, -np.inf))


def test_the_exponential_is_within_two_units_of_the_last_place() -> None:
    rng = np.random.default_rng(1)
    x = -np.concatenate((rng.exponential(5, 20_000), rng.uniform(0, 708, 20_000), [0.0, 1e-300, 708.0]))
    expected = np.exp(x.astype(np.longdouble))
    found = compute_exponential(x)
    assert np.max(np.abs(found - expected) / np.spacing(np.exp(x))) < 1.5
    assert compute_exponential(np.array([0.0, -0.0, -708.1, -np.inf])).tolist() == [1.0, 1.0, 0.0, 0.0]
