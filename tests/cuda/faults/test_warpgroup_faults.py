"""Mistakes planted in products of warpgroups: other numbers show them, or an order of accesses that is missing."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import pytest

from hocket.backends.cupy.backend import DriverBackend
from hocket.backends.cupy.emulation.access_log import AccessLogBackend, AccessLogDriver
from hocket.backends.cupy.emulation.emulated_driver import EmulatedDriver
from hocket.backends.cupy.emulation.race_detector import list_races_between_launches
from hocket.backends.cupy.kernels.products import tiled
from hocket.conformance import Outcome, run_case
from hocket.conformance.cases.case import parse_test_case
from hocket.graph.dtypes import DType

from ...given.devices.disordered import RacyDriver
from ...given.devices.emulation import IN_FLIGHT, PAST_END, WRONG_RESULTS, finding, needs_compiler
from ...given.devices.products import dense, run_unpacked_product, tiles_of

pytestmark = [needs_compiler, pytest.mark.long()]


def by_warpgroups(shares: int = 1) -> AbstractContextManager[None]:
    return tiles_of(lambda *_: (tiled.WARPGROUP_TILE, shares))


def product(
    rows: int, columns: int, tokens: int, dtype: DType = DType.F16, shares: int = 1
) -> Callable[[DriverBackend], bool]:
    def is_right(backend: DriverBackend) -> bool:
        run_product, error = (dense, 2.0**-19) if dtype is DType.F16 else (run_unpacked_product, 2e-5)
        with by_warpgroups(shares):
            results, want, size = run_product(dtype, rows, columns, tokens, backend)
        same = all(np.array_equal(y, results[0]) for y in results)
        return same and bool((np.abs(results[0] - want) <= error * size).all())

    return is_right


FILE = "warpgroups.cu"
EVEN, ODD, PACKED = product(72, 264, 70), product(71, 133, 9), product(70, 288, 70, DType.Q8_0)
WHOLE = product(256, 264, 9)
SHARED = product(72, 264, 70, shares=2)
LAST = "    if (number + 1 < gridDim.z) return false;\n    if (threadIdx.x == 0) a.numbers[tile] = 0;\n"
WAIT = "wgmma_wait<{}>(block.sum);"
PLANTS = {
    "rows are swizzled otherwise": ("wgmma.cuh", "(u64)1 << 62, EIGHT", "(u64)2 << 62, EIGHT", EVEN),
    "rows are not swizzled": ("wgmma.cuh", "(u64)1 << 62, EIGHT", "(u64)0 << 62, EIGHT", EVEN),
    "the stride of eight rows is wrong": ("wgmma.cuh", "(u64)(1024 / 16) << 32", "(u64)(512 / 16) << 32", EVEN),
    "an operand lies outside": ("wgmma.cuh", "(u64)(1024 / 16) << 32", "(u64)(16384 / 16) << 32", EVEN),
    "rows lie otherwise than products take them": ("wgmma.cuh", "(piece ^ row % 8) * 8", "piece * 8", EVEN),
    "stages begin anywhere": ("wgmma.cuh", "room + (-shared_address(room) & 1023)", "room", EVEN),
    "columns are left out": ("wgmma.cuh", "STEP = 2,", "STEP = 1,", EVEN),
    "both warpgroups have the same entries": (FILE, "[threadIdx.x / 128 * 64]", "[0]", EVEN),
    "warps of a warpgroup begin different products": (
        FILE,
        "[threadIdx.x / 128 * 64]",
        "[threadIdx.x / 128 * 64 ^ threadIdx.x / 64 % 2 * 64]",
        PACKED,
    ),
    "lanes of a warp begin different products": (
        FILE,
        "[threadIdx.x / 128 * 64]",
        "[threadIdx.x % 2 * 64]",
        EVEN,
    ),
    "the small term of x is left out": (
        FILE,
        "for (int term = TERMS - 1; term >= 0; term--)  // small",
        "for (int term = 0; term >= 0; term--)  // small",
        EVEN,
    ),
    "nobody waits for the last product": (FILE, WAIT.format(0), "", EVEN),
    "results are taken before the last product": (FILE, WAIT.format(0), WAIT.format(1), EVEN),
    "a product is waited for too late": (FILE, WAIT.format(1), WAIT.format(2), EVEN),
    "products belong to no group": (FILE, "        wgmma_commit();\n", "", EVEN),
    "registers are not fenced": (FILE, "        wgmma_fence();\n", "", EVEN),
    "a stage is read before it is there": (
        FILE,
        "cp_async_wait<AHEAD - 1>();",
        "cp_async_wait<AHEAD>();",
        EVEN,
    ),
    "a stage is written over while it is read": (
        FILE,
        "fetch(stages[(now + AHEAD) % STAGES]",
        "fetch(stages[(now + AHEAD + 1) % STAGES]",
        EVEN,
    ),
    "weights are unpacked over those that are read": (
        FILE,
        "weights.next(parity, stages[(now + 1) % STAGES]",
        "weights.next(parity, stages[now]",
        PACKED,
    ),
    "codes of another stage": (FILE, "codes[parity][half], F::scales", "codes[0][half], F::scales", PACKED),
    "codes of another half": (FILE, "codes[parity][half], F::scales", "codes[parity][0], F::scales", PACKED),
    "columns of another block are added": (
        FILE,
        "a.run, a.columns);\n    Block<T",
        "a.columns, a.columns);\n    Block<T",
        SHARED,
    ),
    "what another block has is left out": (FILE, "sum[i] += v.x", "sum[i] = v.x", SHARED),
    "a block takes its own sums twice": (FILE, "all[share * EACH", "mine[0 * EACH", SHARED),
    "the first block has all": (
        FILE,
        LAST,
        "    if (number > 0 && threadIdx.x == 0) a.numbers[tile] = 0;\n    if (number > 0) return false;\n",
        SHARED,
    ),
    "entries change places": (FILE, "16 + 8 * h + g;", "16 + h + 2 * g;", EVEN),
    "a row past the last has a result": (
        FILE,
        "if (first + row + 1 < a.rows) out[row + 1]",
        "out[row + 1]",
        ODD,
    ),
    "a pair past the last row has a result": (FILE, "pairs && first + row + 1 < a.rows", "pairs", EVEN),
    "results of scaled rows stay scaled": (
        FILE,
        "IS_SCALED<T> ? a.undo[rows[entry]] : 1.0f;\n#pragma unroll\n            for (int j",
        "1.0f;\n#pragma unroll\n            for (int j",
        EVEN,
    ),
    "columns past the last are read": (FILE, "&& rows >= MOST && start + COLUMNS <= columns", "&& rows >= MOST", WHOLE),
}


STOP_MESSAGES = {
    "an operand lies outside": "a product reads shared memory outside of its",
    "warps of a warpgroup begin different products": "the four warps of a warpgroup begin different products",
    "lanes of a warp begin different products": "lanes of a warp begin products of different operands",
    "nobody waits for the last product": "ends with products in flight",
    "results are taken before the last product": "ends with products in flight",
    "products belong to no group": "ends with products in flight",
    "registers are not fenced": "registers no wgmma.fence stands before",
    "a stage is read before it is there": IN_FLIGHT,
    "a row past the last has a result": PAST_END,
    "a pair past the last row has a result": PAST_END,
    "columns past the last are read": PAST_END,
}
"""Messages of the emulation, which stops these launches; all other mistakes give wrong results."""


@pytest.mark.nightly(cases=6)
@pytest.mark.parametrize("name", PLANTS)
def test_a_mistake_in_a_product_is_found(name):
    file, old, new, is_right = PLANTS[name]
    assert re.search(STOP_MESSAGES.get(name, WRONG_RESULTS), finding(file, old, new, is_right))


@pytest.mark.parametrize(
    "is_right", [EVEN, ODD, PACKED, WHOLE, SHARED], ids=["even", "odd", "packed", "whole", "shared"]
)
def test_without_a_mistake_nothing_is_found(is_right):
    assert is_right(DriverBackend(EmulatedDriver()))


def disorders(case: str, *edit: str) -> list[str]:
    driver = RacyDriver(*edit) if edit else AccessLogDriver()
    backend = AccessLogBackend(driver)
    with by_warpgroups(shares=2):
        result = run_case(parse_test_case(case), backend, backend.device(0))
    assert result.outcome is Outcome.PASS
    return list_races_between_launches(driver.take_log(), driver.memory)


FLOATS, CODES = "mul_mat(w=f16[32,128], x=f32[33,128])", "mul_mat(w=q8_0[32,128], x=f32[33,128])"
SHOW, PRODUCT = "            show_to_products();\n", "wgmma.cuh"
HIDDEN = {
    "copies that are not shown to products": (FLOATS, SHOW, "", PRODUCT),
    "unpacked weights that are not shown to products": (CODES, SHOW, "", PRODUCT),
    "copies that are shown before they are there": (
        FLOATS,
        "            cp_async_wait<AHEAD - 1>();\n" + SHOW,
        SHOW + "            cp_async_wait<AHEAD - 1>();\n",
        PRODUCT,
    ),
    "numbers of the run before, of which both blocks have a second one": (FLOATS, "a.numbers[tile] = 0;", ";", FILE),
}


@pytest.mark.parametrize("case", [FLOATS, CODES])
def test_what_products_read_is_in_order(case):
    assert disorders(case) == []


@pytest.mark.nightly(cases=1)
@pytest.mark.parametrize("name", HIDDEN)
def test_what_is_not_in_order_is_found(name):
    """The results are right: memory is seen at once here, and blocks run one after the other."""
    case, old, new, where = HIDDEN[name]
    assert any(where in pair for pair in disorders(case, FILE, old, new))
