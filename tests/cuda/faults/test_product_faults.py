"""Mistakes planted in the kernels of products: each is found by the emulation, or by exact integers."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from unittest.mock import patch

import numpy as np
import pytest

from hocket import ops
from hocket.backends.cupy.backend import DriverBackend
from hocket.backends.cupy.emulation.emulated_driver import EmulatedDriver
from hocket.backends.cupy.kernels.products import tiled
from hocket.graph import Graph, input, weight
from hocket.graph.dtypes import DType
from hocket.ops.quantisation import dequantise
from hocket.scheduler import load, plan_for_group

from ...given.devices.emulation import IN_FLIGHT, PAST_END, WRONG_RESULTS, finding, needs_compiler
from ...given.devices.products import dense, product, run_unpacked_product
from ...given.random_rows import random_rows

pytestmark = needs_compiler
RNG = np.random.default_rng(11)


def packed_product(dtype: DType, rows: int, columns: int, tokens: int) -> Callable[[DriverBackend], bool]:
    def is_right(backend: DriverBackend) -> bool:
        found, want, size = product(dtype, rows, columns, tokens, backend)
        same = all(np.array_equal(f, found[0]) for f in found)
        return same and bool((np.abs(found[0] - want) <= 2e-6 * size + 1e-30).all())

    return is_right


def dense_product(columns: int, rows: int = 70, shares: int = 0) -> Callable[[DriverBackend], bool]:
    """Return a test of tall tiles; `shares` blocks may share their columns."""

    def is_right(backend: DriverBackend) -> bool:
        tall = patch.object(tiled, "choose_tile_shape", lambda *_, **__: (tiled.TALL_TILE, shares))
        with tall if shares else nullcontext():
            results, want, size = dense(DType.F16, rows, columns, 9 + shares, backend)
        return all(np.array_equal(f, results[0]) for f in results) and bool(
            (np.abs(results[0] - want) <= 2.0**-19 * size).all()
        )

    return is_right


def unpacked_product(dtype: DType, columns: int) -> Callable[[DriverBackend], bool]:
    def is_right(backend: DriverBackend) -> bool:
        results, want, size = run_unpacked_product(dtype, 70, columns, 130, backend)
        same = all(np.array_equal(f, results[0]) for f in results)
        return same and bool((np.abs(results[0] - want) <= 2e-5 * size).all())

    return is_right


def make_routed_check(tokens: int) -> Callable[[DriverBackend], bool]:
    def is_right(backend: DriverBackend) -> bool:
        raw = random_rows(DType.Q8_0, 3 * 32, 32, RNG).reshape(3, 32, -1)
        x = RNG.standard_normal((tokens, 1, 32)).astype(np.float32)
        ids = RNG.integers(0, 6, (tokens, 2)).astype(np.int32)
        w = weight("w", (3, 32, 32), DType.Q8_0)
        node = ops.mul_mat_id(w, input("x", x.shape), input("ids", ids.shape, DType.I32), first=2, total=6)
        run = load(plan_for_group(Graph({"y": node}), [(backend, backend.device(0))]), {"w": raw})
        results = [run.run({"x": x, "ids": i})["y"] for i in (ids, ids, np.full_like(ids, 2), ids, ids)]
        here = ((ids >= 2) & (ids < 5))[..., None]
        matrices = dequantise(raw.reshape(96, -1), DType.Q8_0).reshape(3, 32, 32)
        want = np.einsum("tink,tk->tin", matrices[np.clip(ids - 2, 0, 2)], x[:, 0]) * here
        is_close = np.abs(results[0] - want).max() <= 0.02 * np.abs(want).max()
        full = np.einsum("nk,tk->tn", matrices[0], x[:, 0])[:, None]
        is_close = is_close and np.abs(results[2] - full).max() <= 0.02 * np.abs(full).max()
        return bool(is_close) and all(np.array_equal(results[i], results[0]) for i in (1, 3, 4))

    return is_right


LONG, WIDE, MANY, FAR, TALL = (
    packed_product(DType.Q4_0, *shape)
    for shape in ((32, 4224, 1), (33, 96, 2), (600, 32, 1), (17, 8192, 4), (33, 288, 9))
)
HIGH, MIXED = packed_product(DType.Q5_1, 33, 64, 2), packed_product(DType.Q6_K, 33, 256, 9)
QUADS, OCTETS = packed_product(DType.IQ3_S, 33, 256, 2), packed_product(DType.IQ2_XXS, 33, 256, 9)
DENSE, ODD = dense_product(136), dense_product(133)
SHARED, SHARED_ODD = dense_product(136, 72, shares=2), dense_product(136, shares=2)
UNPACKED, HALVES, SMALL_BLOCKS = (
    unpacked_product(dtype, n) for dtype, n in ((DType.Q8_0, 288), (DType.Q6_K, 256), (DType.Q4_K, 256))
)
PLANTS = {
    "codes are read before all warps wrote them": (
        "packed_few.cu",
        "        __syncthreads();\n        float sum[N] = {};",
        "        float sum[N] = {};",
        LONG,
    ),
    "sums of other warps are read too early": (
        "packed_few.cu",
        "        __syncthreads();\n        each_own",
        "        each_own",
        LONG,
    ),
    "the sum of a group is taken on to the next": ("packed_few.cu", "                sum[n] = 0.0f;\n", "", MANY),
    "the sums of a warp lie where those of another do": ("packed_few.cu", "to = warp + group;", "to = group;", LONG),
    "half of the lanes of a row are left out": ("packed_few.cu", "= P::DOWN; by < 32;", "= 32; by < 32;", LONG),
    "a stretch of columns is left out": ("packed_few.cu", "start += most * P::CHUNK", "start += end", FAR),
    "the sum of the stretches before is lost": ("packed_few.cu", "sums[i] += parts", "sums[i] = parts", FAR),
    "columns past the last are loaded": ("packed_few.cu", "if (block + i < end) load_one", "load_one", WIDE),
    "a row past the last is written": ("packed_few.cu", "if (row >= made.rows || n", "if (n", WIDE),
    "a high bit of the wrong column": (
        "packed.cuh",
        "window<HIGH>(high[t * HIGH / 4], t)",
        "window<HIGH>(high[t * HIGH / 4], 0)",
        HIGH,
    ),
    "a stage is read before it is there": ("packed.cu", "cp_async_wait<0>();", "cp_async_wait<1>();", TALL),
    "a stage is read before all threads have theirs": (
        "packed.cu",
        "__syncthreads();  // this stage is there, and nobody reads the one before",
        "",
        TALL,
    ),
    "the sums of a warp are written over a stage that is still read": (
        "packed.cu",
        "        __syncthreads();\n        made.reduce",
        "        made.reduce",
        TALL,
    ),
    "sums of warps are added too early": (
        "packed.cu",
        "% 4];\n            __syncthreads();\n            if (warp_k < half)",
        "% 4];\n            if (warp_k < half)",
        TALL,
    ),
    "the fragment of another half": ("packed.cu", "2 * k + lane / 8 % 2", "2 * k + lane / 16", TALL),
    "the scale of another row": ("packed.cu", "mine.scale[h], g + 8 * i", "mine.scale[h], g + 4 * i", TALL),
    "the scale of another half": ("packed.cu", "scale[row][h], s);", "scale[row][0], s);", MIXED),
    "two bits of the wrong column": ("packed.cuh", ">> W * (2 * t % (8 / W))", ">> W * (t % (8 / W))", MIXED),
    "entries of a book behind the first": (
        "code_books.cuh",
        "index |= (c.extra >> (4 * half + c.t) & 1) << 8",
        "index |= (c.extra >> 4 * half & 1) << 8",
        QUADS,
    ),
    "the eighth sign of a group is none": (
        "code_books.cuh",
        "return seven | ((all ^ all << 2) & 0xcc) << 24;",
        "return seven;",
        OCTETS,
    ),
    "the scale among the codes is left out": ("code_books.cuh", "SCALED = true;", "SCALED = false;", OCTETS),
    "a book that others have not loaded": (
        "packed.cu",
        "    F::load_book();\n    __syncthreads();\n    T made;",
        "    T made;\n    F::load_book();",
        OCTETS,
    ),
    "digits of the wrong column": ("packed.cuh", "2 * (i - 5))", "i - 5)", packed_product(DType.TQ1_0, 33, 256, 1)),
    "an entry past the last is written": (
        "packed.cu",
        "if (entry < tile.z && row < a.rows)",
        "if (row < a.rows)",
        TALL,
    ),
    "an expert of elsewhere is the first one": (
        "packed_few.cu",
        "    int end = matrix < 0 ? 0 : (int)a.blocks",
        "    int end = (int)a.blocks",
        make_routed_check(1),
    ),
    "counts are read before all are counted": (
        "routes.cu",
        "&counts[matrix < 0 ? here : matrix], 1);\n    }\n    __syncthreads();",
        "&counts[matrix < 0 ? here : matrix], 1);\n    }",
        make_routed_check(24),
    ),
    "tiles of the run before are left": (
        "routes.cu",
        "a.tiles[i] = make_int4(0, 0, 0, 0);",
        ";",
        make_routed_check(24),
    ),
    "the small term of x is left out": (
        "tiled.cu",
        "for (int term = TERMS - 1; term >= 0; term--)",
        "for (int term = 0; term >= 0; term--)",
        DENSE,
    ),
    "a stage of floats is read before it is there": (
        "tiled.cu",
        "cp_async_wait<STAGES - 2>();",
        "cp_async_wait<STAGES - 1>();",
        DENSE,
    ),
    "a stage of floats is read before all threads have theirs": (
        "tiled.cu",
        "cp_async_wait<STAGES - 2>();\n            __syncthreads();",
        "cp_async_wait<STAGES - 2>();",
        DENSE,
    ),
    "a stage of floats is written over while it is read": (
        "tiled.cu",
        "now == 0 ? STAGES - 1 : now - 1], start",
        "now], start",
        DENSE,
    ),
    "columns of another block are added": (
        "tiled.cu",
        "end = min(begin + a.run, a.columns)",
        "end = a.columns",
        SHARED,
    ),
    "what another block has is left out": ("tiled.cu", "sum.x += v.x", "sum.x = v.x", SHARED),
    "what another block has of the last rows is left out": ("tiled.cu", "sum += from", "sum = from", SHARED_ODD),
    "results of scaled rows stay scaled": ("tiled.cu", "IS_SCALED<T> ? a.undo[rows[entry]] : 1.0f", "1.0f", DENSE),
    "an entry past the last has a result": ("tiled.cu", "if (entry >= tile.z) continue;", "", DENSE),
    "a row past the last has a result": ("tiled.cu", "if (row < a.rows) out", "out", DENSE),
    "columns past the last are read": (
        "tiled.cu",
        "column + i < columns ? row[column + i].bits : 0",
        "row[column + i].bits",
        ODD,
    ),
    "columns of x past the last are no zeros": ("tiled.cu", "if (c + 3 < a.columns) v.w", "v.w", ODD),
    "what became unsigned stays so": ("tiled.cu", "8388736.0f", "8388608.0f", UNPACKED),
    "a row of another half": (
        "tiled.cu",
        "threadIdx.x / 64 * 32 + lane;",
        "threadIdx.x / 64 * 32 + lane / 2;",
        UNPACKED,
    ),
    "scales of the first half": ("tiled.cu", "part = F::HALVES ? h : 0;", "part = 0;", HALVES),
    "no least number": ("tiled.cu", "fmaf(code, s.scale[part], s.bias[part])", "code * s.scale[part]", SMALL_BLOCKS),
    "a stage of x is read before it is there": ("tiled.cu", "cp_async_wait<1>();", "cp_async_wait<2>();", UNPACKED),
    "a stage of weights is read before all threads have theirs": (
        "tiled.cu",
        "cp_async_wait<1>();\n            __syncthreads();",
        "cp_async_wait<1>();",
        UNPACKED,
    ),
    "a stage of x is written over while it is read": (
        "tiled.cu",
        "x[now == 0 ? 2 : now - 1], start",
        "x[now], start",
        UNPACKED,
    ),
    "codes of another stage": (
        "tiled.cu",
        "unpack_row<F>(words, codes[parity]",
        "unpack_row<F>(words, codes[0]",
        UNPACKED,
    ),
}


NO_ADDRESS = "touches memory (that is not its own|through a wild pointer)"
"""Of an address before the weights: the processor tells a second form if the address is not canonical."""
STOP_MESSAGES = {
    "columns past the last are loaded": PAST_END,
    "a row past the last is written": PAST_END,
    "a stage is read before it is there": IN_FLIGHT,
    "an expert of elsewhere is the first one": f"few<Q8_0, 1>.*{NO_ADDRESS}",
    "a stage of floats is read before it is there": IN_FLIGHT,
    "a row past the last has a result": PAST_END,
    "columns past the last are read": PAST_END,
    "columns of x past the last are no zeros": "split_rows.*" + PAST_END,
    "a stage of x is read before it is there": IN_FLIGHT,
}
"""Messages of the emulation, which stops these launches; all other mistakes give wrong results."""


@pytest.mark.nightly(cases=10)
@pytest.mark.long
@pytest.mark.parametrize("name", PLANTS)
def test_a_mistake_in_a_product_is_found(name):
    file, old, new, is_right = PLANTS[name]
    assert re.search(STOP_MESSAGES.get(name, WRONG_RESULTS), finding(file, old, new, is_right))


@pytest.mark.long
@pytest.mark.parametrize("is_right", dict.fromkeys(p[3] for p in PLANTS.values()))
def test_without_a_mistake_nothing_is_found(is_right):
    assert is_right(DriverBackend(EmulatedDriver()))
