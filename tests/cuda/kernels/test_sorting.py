"""Orders of rows of any length on emulated devices: ties, NaN and infinities as the ops declare them; mistakes planted
in the kernels are found."""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import pytest

from hocket import ops
from hocket.backends.cupy.backend import DriverBackend
from hocket.backends.cupy.emulation.emulated_driver import EmulatedDriver
from hocket.backends.cupy.kernels.sorting import (
    ITEMS_PER_BLOCK,
    MAX_SINGLE_BLOCK_ITEMS,
    iterate_passes_to_sort_first_items,
)
from hocket.graph import Graph, input
from hocket.scheduler import load, plan_for_group

from ...given.devices.emulation import PAST_END, WRONG_RESULTS, finding, needs_compiler

pytestmark = needs_compiler
SHAPES = [(3, n) for n in (1, 2, 31, 32, 33, 255, 257, 1023, 1024, 1025)]
SHAPES += [(1, n) for n in (4095, 4096, 4097, 6145, 8193, 100_000)]


def rows(shape):
    """Entries with many ties, both zeros, infinities and NaN with either sign."""
    rng = np.random.default_rng(0)
    x = rng.integers(-40, 40, shape).astype(np.float32) / 8
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45], np.float32)
    return np.where(rng.random(shape) < 0.1, rng.choice(special, shape), x).astype(np.float32)


def run_four_orders(node, x, backend=None):
    """Return the results of four runs with different orders of threads."""
    backend = backend or DriverBackend(EmulatedDriver())
    run = load(plan_for_group(Graph({"y": node}), [(backend, backend.device(0))]), {})
    first, *others = (run.run({"x": x})["y"].copy() for _ in range(4 if x.size < 20_000 else 1))
    assert all(np.array_equal(first, other) for other in others)
    return first


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_of_any_length_are_ordered_as_the_op_says(shape, descending):
    x = rows(shape)
    want = np.argsort(-x if descending else x, axis=-1, kind="stable")
    np.testing.assert_array_equal(run_four_orders(ops.argsort(input("x", shape), descending=descending), x), want)


@pytest.mark.parametrize(
    ("shape", "k"),
    [
        ((2, 33), 33),
        ((5, 128), 8),
        ((1, 1025), 1),
        ((2, 4097), 40),
        ((1, 9000), 1024),
        ((1, 9000), 1025),
        ((1, 9000), 5000),
    ]
    + [((1, 100_000), k) for k in (1, 40, 2048)],
)
def test_the_largest_come_in_order(shape, k):
    x = rows(shape)
    want = np.argsort(-x, axis=-1, kind="stable")[..., :k]
    np.testing.assert_array_equal(run_four_orders(ops.top_k(input("x", shape), k=k), x), want)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (3, 5)])
def test_of_nothing_there_is_no_order(shape):
    assert run_four_orders(ops.top_k(input("x", shape), k=0), rows(shape)).shape == (shape[0], 0)
    assert run_four_orders(ops.argsort(input("x", shape)), rows(shape)).shape == shape


@pytest.mark.parametrize("k", [1, 40, 682, 683, 1024, 1025, 2048, 2049, 262_144])
@pytest.mark.parametrize(
    "columns", [1, MAX_SINGLE_BLOCK_ITEMS, MAX_SINGLE_BLOCK_ITEMS + 1, 3 * ITEMS_PER_BLOCK + 1, 262_144]
)
def test_every_round_reads_what_the_one_before_wrote(columns, k):
    k, before = min(k, columns), columns
    for launch in iterate_passes_to_sort_first_items(columns, k):
        assert launch.columns == before
        assert launch.length <= MAX_SINGLE_BLOCK_ITEMS or launch.is_merge
        assert launch.runs * launch.items_per_run < before or launch.columns == columns or launch.is_merge
        before = launch.runs * launch.items_per_run
    assert (launch.runs, launch.items_per_run) == (1, k)


def test_the_largest_of_a_vocabulary_take_three_launches_and_its_order_eight():
    assert len(list(iterate_passes_to_sort_first_items(262_144, 40))) == 3
    assert len(list(iterate_passes_to_sort_first_items(262_144, 262_144))) == 8


# ---------------------------------------------------------------------------------------------------- planted mistakes


def sorts_right(shape, k, backend):
    x = rows(shape)
    want = np.argsort(-x, axis=-1, kind="stable")[..., :k]
    node = ops.top_k(input("x", shape), k=k)
    try:
        return np.array_equal(run_four_orders(node, x, backend), want)
    except AssertionError:
        return False


SORTED, MERGED = partial(sorts_right, (2, 600), 600), partial(sorts_right, (1, 5000), 5000)
PLANTS = {
    "steps of other warps are not waited for": (
        "sorting.cu",
        "if (far || was_far) __syncthreads();\n        else",
        "",
        SORTED,
    ),
    "steps of other lanes are not waited for": ("sorting.cu", "        else __syncwarp();", "", SORTED),
    "every run becomes sorted upwards": ("sorting.cu", "(first | c << low) >> stage & 1", "false", SORTED),
    "the wrong three bits": ("sorting.cu", "(thread >> low << (low + 3))", "(thread >> low << (low + 2))", SORTED),
    "two zeros are not equal": ("items.cuh", "if (x == 0.0f) key = 0x80000000u;", "", SORTED),
    "NaN comes first": ("items.cuh", "if (x != x) key = 0xffffffffu;", "if (x != x) key = 0;", SORTED),
    "what is beyond a row is no item": (
        "sorting.cu",
        "u64 item = LAST;\n        if (i < there)",
        "u64 item = LAST;\n        if (i <= there)",
        SORTED,
    ),
    "the last run is sorted with the next row": ("sorting.cu", "min(a.length, a.columns - first)", "a.length", MERGED),
    "items are written before they are sorted": (
        "sorting.cu",
        "u64 *sorted, i32 *out) {\n    __syncthreads();",
        "u64 *sorted, i32 *out) {",
        MERGED,
    ),
    "the second run is not turned round": ("sorting.cu", "other[TILE - 1 - i]", "other[i - (TILE - rest)]", MERGED),
    "a tile takes too few of the first run": (
        "sorting.cu",
        "probe = low + (lane + 1) * step - 1",
        "probe = low + (lane + 2) * step - 1",
        MERGED,
    ),
    "shares are read before they are there": (
        "sorting.cu",
        "shares[warp] = share;\n    }\n    __syncthreads();",
        "shares[warp] = share;\n    }",
        MERGED,
    ),
    "a run that is alone is merged with the next": (
        "sorting.cu",
        "run + 1 < a.runs ? a.length : 0",
        "a.length",
        partial(sorts_right, (1, 5000), 4999),
    ),
}


STOP_MESSAGES = {
    "what is beyond a row is no item": "sort_runs.*" + PAST_END,
    "the last run is sorted with the next row": "sort_runs.*" + PAST_END,
    "shares are read before they are there": "merge_runs.*" + PAST_END,
    "a run that is alone is merged with the next": "merge_runs.*" + PAST_END,
}
"""Messages of the emulation, which stops these launches; all other mistakes give wrong results."""


@pytest.mark.nightly(cases=5)
@pytest.mark.long
@pytest.mark.parametrize("name", PLANTS)
def test_a_mistake_in_the_order_is_found(name):
    file, old, new, right = PLANTS[name]
    assert re.search(STOP_MESSAGES.get(name, WRONG_RESULTS), finding(file, old, new, right))


@pytest.mark.parametrize("right", [SORTED, MERGED])
def test_without_a_mistake_nothing_is_found(right):
    assert right(DriverBackend(EmulatedDriver()))
