"""Attention on CUDA, emulated: every variant against its definition in float64, over every shape that has a kernel."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product

import numpy as np
import pytest

from hocket.backends.cupy.backend import DriverBackend
from hocket.backends.cupy.emulation.emulated_driver import EmulatedBackend, EmulatedDriver
from hocket.backends.cupy.kernels.attention import attention as binding
from hocket.backends.cupy.kernels.blocks import BLOCK_TYPE_NAMES
from hocket.conformance import Outcome, run_case
from hocket.conformance.cases.case import parse_test_case
from hocket.conformance.cases.inputs import generate_random_operands
from hocket.conformance.checks.run_case import run_three_times_guarded
from hocket.ops import attention

from ...given.devices.attention import by_candidates, by_warps
from ...given.devices.emulation import FaultyDriver, needs_compiler
from ...given.devices.key_blocks import run_over_empty_cache

pytestmark = needs_compiler

TOLERANCE = 5e-12
"""Of the worst row, in the normalised mean square: errors of 2e-6.  Products of halves alone are off by 1e-4."""
ROUNDED = {"f16": 1e-6, "bf16": 6e-5}
"""Where queries and weights become such cells."""


def allowed_nmse(case):
    many = case.specs["q"].shape[-3] * case.specs["q"].shape[-2] // case.specs["k"].shape[-2] >= binding.MIN_TILED_ROWS
    short = case.specs["k"].shape[-1] <= 256 and case.specs["v"].shape[-1] <= 256
    return ROUNDED.get(str(case.specs["k"].dtype), TOLERANCE) if many and short else TOLERANCE


def case(t, h, g, s, d, e=None, rest="", ahead="", mask=None, inputs="normal", layout="contiguous", cells="f32"):
    """A case over `t` tokens, `h` heads for each of `g` key heads, `s` keys of size `d`, values of size `e`."""
    specs = [f"q=f32[{ahead}{t},{h * g},{d}]", f"k={cells}[{ahead}{s},{g},{d}]", f"v={cells}[{ahead}{s},{g},{e or d}]"]
    specs += [f"mask=f32[{mask}{t},{s}]"] if mask is not None else []
    return parse_test_case(
        f"attention({', '.join(specs)}, scale={d**-0.5:.4f}{rest and ', ' + rest}, layout={layout}, inputs={inputs})"
    )


STRIDED_LAYOUTS = ("offset", "sliced", "permuted", "broadcast")
FEW = (
    *(case(1, h, 2, 45, 64) for h in (1, 2, 3, 8, 9)),
    *(case(t, 2, 1, 70, 32, mask="") for t in range(2, 10)),
    *(case(2, 3, 2, s, 16, mask="", inputs="infinities") for s in (0, 1, 31, 32, 33, 129)),
    *(case(2, 4, 1, s, 64, mask="", inputs="infinities") for s in (300, 1100)),  # splits
    *(case(1, 1, 1, 128 * n, 8) for n in (70, 130)),  # more than are added up at once, and as many as there may be
    *(case(3, 2, 1, 40, d, mask="") for d in (4, 60, 68, 96, 128, 200, 256)),
    *(case(1, 2, 1, 150, d, e) for d, e in ((192, 128), (576, 512), (64, 512), (512, 4))),
    *(case(2, 1, 2, 20, d, e) for d, e in ((1, 1), (7, 5), (66, 130), (644, 8), (8, 1030))),  # any size
    case(33, 1, 2, 40, 64, mask=""),
    case(1, 1, 2, 40, 7, mask=""),
    *(case(2, 4, 2, 40, 64, mask="", layout=how) for how in STRIDED_LAYOUTS),
)
TILED = (
    case(33, 2, 2, 70, 64, mask="", inputs="infinities"),
    case(70, 1, 1, 130, 64),
    case(70, 3, 1, 65, 40, 24, mask=""),
    *(case(t, 1, 2, 600, 64, mask="") for t in (64, 140)),  # splits of few rows, and of many
    case(64, 1, 1, 0, 64, mask=""),
    case(65, 1, 1, 1, 16, mask=""),
    *(case(66, 1, 1, 70, *s, mask="", inputs="infinities") for s in ((128, 128), (192, 128), (256, 250), (7, 129))),
    *(case(9, 8, 2, 70, 128, mask="", layout=how) for how in STRIDED_LAYOUTS),
    case(33, 2, 2, 70, 576, 512, mask="", inputs="infinities"),  # latent: rows, half rows, keys that are left
    *(case(2, 33, 1, s, 576, 512, rest="sinks=f32[33]") for s in (1, 17)),
    case(1, 64, 1, 300, 576, 512, mask=""),  # splits
    case(64, 1, 1, 33, 300, 260, ahead="2,", mask="", layout="permuted"),
)
CELLS = (
    *(case(t, 2, 2, 75, 64, mask="", inputs="infinities", cells=c) for t in (3, 33) for c in ("f16", "bf16")),
    *(case(70, 2, 1, s, 128, cells="f16") for s in (0, 1, 63, 65, 200)),
    *(
        case(t, 1, 1, 70, d, e, mask="", cells=c)
        for t in (1, 66)
        for c, d, e in (("f16", 192, 128), ("bf16", 250, 256))
    ),
    *(case(t, 1, 1, 40, d, e, cells="f16") for t in (1, 66) for d, e in ((7, 5), (66, 130), (576, 512), (8, 1030))),
    *(case(t, 8, 2, 70, 128, mask="", layout=how, cells="f16") for t in (1, 9) for how in STRIDED_LAYOUTS),
    *(case(64, 1, 2, s, 64, mask="", cells="bf16") for s in (600, 700)),  # splits
    *(case(1, 4, 1, s, 128, mask="", inputs="infinities", cells=c) for c in ("f16", "bf16") for s in (300, 1100)),
    case(1, 2, 1, 9000, 64, cells="f16"),  # as many splits as there may be
)
VARIANTS = tuple(
    case(t, 2, 2, 75, 64, ahead=ahead, mask=mask, inputs=inputs, rest=", ".join(rest), cells=cells)
    for t, cells in ((3, "f32"), (33, "f32"), (3, "f16"), (33, "f16"))
    for ahead, mask, inputs, rest in (
        ("", "", "normal", ("sinks=f32[4]",)),
        ("", "", "infinities", ("sinks=f32[4]", "softcap=2.0")),
        ("", None, "normal", ("softcap=5.0",)),
        ("", "", "infinities", ("max_bias=8.0",)),
        ("", "4,", "normal", ('mask_heads="each"',)),
        ("", "2,", "infinities", ('mask_heads="tiled"', "max_bias=8.0")),
        ("2,", "", "normal", ()),
        ("2,", "2,", "normal", ()),
        ("4,", "2,", "infinities", ("sinks=f32[4]",)),
        ("2,3,", "3,", "normal", ()),
        ("2,2,", "2,1,4,", "normal", ('mask_heads="each"',)),
        *(("", "", kind, ()) for kind in ("uniform", "large", "denormal", "ties", "zeros", "constant")),
    )
)
SIZES = tuple(
    case(t, 1, 1, 40, d, e, cells=cells)
    for t in (1, 2, 4, 8, 64)
    for d, e in ((64, 64), (128, 128), (192, 128), (256, 256), (576, 512), (7, 5))
    for cells in ("f32", "f16", "bf16")
)
BY_HALVES = [c for c in CELLS + VARIANTS + SIZES if "f16" in str(c) and allowed_nmse(c) > TOLERANCE]


@pytest.mark.nightly(cases=52)
@pytest.mark.long(cases=1)
@pytest.mark.parametrize("case", FEW + TILED + CELLS + VARIANTS + SIZES, ids=str)
def test_attention_is_its_definition_in_every_order_of_threads(case):
    """The kit runs a case three times, each in another order, and wants the same bits."""
    backend = EmulatedBackend()
    result = run_case(case, backend, backend.device(0))
    assert result.outcome is Outcome.PASS, result.why
    if case.inputs in ("normal", "infinities"):
        assert result.difference.nmse < allowed_nmse(case)


@pytest.mark.nightly(cases=18)
@pytest.mark.long
@pytest.mark.parametrize("choose", [by_warps, by_candidates])
@pytest.mark.parametrize("case", BY_HALVES, ids=str)
def test_attention_by_other_kernels_is_its_definition(case, choose):
    with choose():
        test_attention_is_its_definition_in_every_order_of_threads(case)


@pytest.mark.long
def test_every_kernel_has_a_case():
    """Each size of heads, each count of rows."""
    launched = set()

    class Driver(EmulatedDriver):
        def record(self, launches, on):
            launched.update(launch.kernel.name for launch in launches)
            return lambda: None

    backend = DriverBackend(Driver())
    backend.driver.prepare_kernel = lambda kernel, on: None  # nothing runs
    for variant, c in product((nullcontext, by_warps, by_candidates), (*FEW, *TILED, *CELLS, *VARIANTS, *SIZES)):
        with variant():
            run_case(c, backend, backend.device(0))
    for cache, size, tokens in product(BLOCK_TYPE_NAMES, (64, 256), (1, 2, 4, 70)):
        run_over_empty_cache((backend, backend.device(0)), cache, size, tokens)
    assert launched == {name for source in binding.SOURCES for name in source.names}


@pytest.mark.parametrize(("t", "cells"), [(1, "f32"), (4, "f32"), (70, "f32"), (70, "f16")])
def test_tiles_that_are_hidden_are_not_read(t, cells):
    """A causal mask over a long cache: keys behind the last token, and before the window, may hold anything."""
    keys, window, last = 640, 100, 300
    c = case(t, 1, 1, keys, 64, mask="", cells=cells)
    units = generate_random_operands(c)
    distance = last - t + 1 + np.arange(t)[:, None] - np.arange(keys)
    units["mask"] = np.where((distance >= 0) & (distance < window), 0.0, -np.inf)
    want = attention.reference(*units.values(), scale=c.attributes_with_defaults["scale"])
    dirty = {**units, "k": units["k"].copy(), "v": units["v"].copy()}
    for x in (dirty["k"], dirty["v"]):
        x[384:] = x[:128] = np.nan
    backend = EmulatedBackend()
    (got,) = run_three_times_guarded(c, dirty, backend, backend.device(0))
    np.testing.assert_allclose(got, want, atol=3e-3 if cells == "f16" else 3e-6)


def test_numbers_of_any_size_keep_their_digits():
    """Keys and values that differ by powers of ten, as halves of powers of two for each row."""
    c = case(66, 1, 1, 70, 64)
    units = generate_random_operands(c)
    size = 10.0 ** np.random.default_rng(1).integers(-9, 9, (70, 1, 1))
    units["k"], units["v"] = units["k"] / size, units["v"] * size
    units = {name: x.astype(np.float32).astype(np.float64) for name, x in units.items()}
    want = attention.reference(*units.values(), scale=c.attributes_with_defaults["scale"])
    bound = attention.reference(units["q"], units["k"], np.abs(units["v"]), scale=c.attributes_with_defaults["scale"])
    (got,) = run_three_times_guarded(c, units, backend := EmulatedBackend(), backend.device(0))
    assert np.max(np.abs(got - want) / bound) < 2e-5  # of scores near 30, in float32


def test_shared_memory_fits_every_device():
    """Check the limit of devices without warpgroup products; other devices have more."""
    assert all(t.shared_bytes + 1024 <= (227 if t.uses_warpgroups else 99) * 1024 for t in binding.TILED_SOURCES)


# ---------------------------------------------------------------------------------------------------- planted faults


FEW_CU, AROUND, TILES, WIDE_CU, SHORT_CU, CELLS_CU, GROUPS = (
    f"attention_{name}.cu" for name in ("few", "around", "tiles", "wide", "short", "cells", "warpgroups")
)
SCORES, MANY_CUH, PRODUCTS = "attention_scores.cuh", "attention_many.cuh", "wgmma.cuh"
SHORT = case(2, 3, 2, 45, 64, mask="")
LONG = case(2, 1, 1, 700, 64, mask="", inputs="infinities")
TILE = case(33, 2, 2, 75, 64, mask="", inputs="infinities")
HEADS = case(1, 1, 512, 300, 8)
SPLITS = case(1, 1, 1, 128 * 70, 8)  # more splits than lanes wait for together
MANY_SPLIT = case(264, 1, 1, 300, 16)
SPLIT = case(64, 1, 1, 600, 64, mask="", inputs="infinities")
WIDE = case(66, 1, 1, 70, 256)
HALVES = case(33, 2, 2, 75, 64, mask="", inputs="infinities", cells="f16")
CELL_SPLITS = case(1, 4, 1, 1100, 64, cells="f16")  # two bunches of splits
FEW_HALVES = case(3, 2, 2, 150, 64, mask="", inputs="infinities", cells="f16")
MANY_HALVES = case(70, 1, 1, 300, 128, cells="bf16")
ALL_HALVES = case(130, 1, 1, 600, 128, cells="f16")
SHARP = case(200, 1, 1, 300, 128, mask="", inputs="large", cells="f16")
TWO_TILES = case(33, 2, 2, 200, 64, mask="", inputs="infinities", cells="f16")
NARROW = case(66, 1, 1, 200, 56, cells="f16")
PACKED_EARLY = (
    "for (int n = 0; n < KEYS / 16; n++) many.pack(scores + 2 * n, weights[n]);\n"
    "            wgmma_wait<0>(acc);\n            many"
)
LATENT = case(2, 33, 1, 45, 576, 512, mask="", inputs="infinities")
FAULTS = {
    "queries are read before they are there": (
        FEW_CU,
        ": 0.0f;\n        }\n        __syncthreads();",
        ": 0.0f;\n        }",
        SHORT,
    ),
    "the mask of another key": (FEW_CU, "bias[r], s + u * at_once + sub)", "bias[r], s + u * at_once)", SHORT),
    "keys past the last one": (
        FEW_CU,
        "s + u * at_once + sub, key_count - 1)",
        "s + u * at_once + sub, 1 << 20)",
        SHORT,
    ),
    "a sum that does not fade": (
        FEW_CU,
        "sum[r] *= fade;\n#pragma unroll\n                    for",
        "\n                    for",
        SHORT,
    ),
    "half of the lanes add up": (
        FEW_CU,
        "by = lanes / 2; by > 0; by >>= 1) score",
        "by = lanes / 2; by > 1; by >>= 1) score",
        SHORT,
    ),
    "no barrier before the next row": (FEW_CU, "all, total);\n        __syncthreads();", "all, total);", SHORT),
    "a warp leaves tiles out": (
        FEW_CU,
        "first += 32 * WARPS * (int)a.splits",
        "first += 64 * WARPS * (int)a.splits",
        HEADS,
    ),
    "a split of its own top": (AROUND, "grown(here.x - top)", "grown(left.state[0] - top)", LONG),
    "the last split is left out": (AROUND, "* WARPS < splits) x", "* WARPS + 1 < splits) x", SPLIT),
    "the last split of many rows": (AROUND, "s < left.splits;", "s + 1 < left.splits;", MANY_SPLIT),
    "splits behind those that come at once are left out": (AROUND, "from += AT_ONCE * WARPS", "from = splits", SPLITS),
    "sums of a warp are left out": (AROUND, "w = 0; w < WARPS; w++) sum", "w = 1; w < WARPS; w++) sum", SPLIT),
    "a tile of which some is seen is hidden": (AROUND, "hidden &= bias == -INFINITY", "hidden &= bias < 9.0f", TILE),
    "a tile of which some is hidden is open": (AROUND, "open &= bias == 0.0f", "open &= true", TILE),
    "keys past the last one are halves": (AROUND, "if (!real || key >= a.keys) row", "if (!real) row", TILE),
    "no wait for keys": (
        TILES,
        "cp_async_wait<1>();\n        __syncthreads();\n        float s",
        "__syncthreads();\n        float s",
        TILE,
    ),
    "no barrier for keys": (
        TILES,
        "cp_async_wait<1>();\n        __syncthreads();\n        float s",
        "cp_async_wait<1>();\n        float s",
        TILE,
    ),
    "keys are overwritten while they are read": (
        TILES,
        "        __syncthreads();\n        const int first",
        "        const int first",
        TILE,
    ),
    "values are overwritten while they are read": (
        TILES,
        "        __syncthreads();\n        tile = next;",
        "        tile = next;",
        TILE,
    ),
    "low halves are left out": (SCORES, "mma_f16(d, high, l), mma_f16(e, high, l + 2);", "", TILE),
    "queries of another warp": (TILES, "q_row = 16 * warp + lane % 16", "q_row = lane % 16", TILE),
    "a row in another bank": (
        TILES,
        "pair(16 * n + lane % 16, 2 * e, turned, E)",
        "(16 * n + lane % 16) * E + 8 * (2 * e + lane / 16)",
        TILE,
    ),
    "values keep the unit of an earlier tile": (
        SCORES,
        "change[r] = fade[r] * (run[r] / most[r])",
        "change[r] = fade[r]",
        WIDE,
    ),
    "the other token's mask": (SCORES, "const Bias bias = biases[8 * r]", "const Bias bias = biases[0]", TILE),
    "columns past the last one are written": (TILES, "if (8 * e + 2 * t + i < width)", "", case(66, 1, 1, 20, 60)),
    "no wait for cells": (SHORT_CU, "cp_async_wait<STAGES - 2>();", "", MANY_HALVES),
    "no barrier for cells": (
        SHORT_CU,
        "cp_async_wait<STAGES - 2>();\n        __syncthreads();",
        "cp_async_wait<STAGES - 2>();",
        MANY_HALVES,
    ),
    "a stage comes too early": (SHORT_CU, "stage ? stage - 1 : STAGES - 1", "stage", MANY_HALVES),
    "queries of another warp meet cells": (SHORT_CU, "q_row = 16 * warp + lane % 16", "q_row = lane % 16", HALVES),
    "sums of values do not fade": (
        MANY_CUH,
        "if (__any_sync(ALL_LANES, fade[0] < 1.0f || fade[1] < 1.0f))",
        "if (false)",
        MANY_HALVES,
    ),
    "one row says whether sums of two fade": (MANY_CUH, "fade[0] < 1.0f || fade[1] < 1.0f", "fade[0] < 1.0f", SHARP),
    "the other token's mask of cells": (MANY_CUH, "{added[0], added[8]}", "{added[0], added[0]}", HALVES),
    "keys past the last one count": (MANY_CUH, "open && first + KEYS <= a.keys", "open", MANY_HALVES),
    "cells past the last one are read": (MANY_CUH, "min(first + row, last_key)", "(first + row)", HALVES),
    "cells of a whole tile that is none are read": (
        MANY_CUH,
        "x.vectors && first + KEYS <= a.keys",
        "x.vectors",
        MANY_HALVES,
    ),
    "a row of cells in the place of another": (MANY_CUH, "cells += BELOW * by.row", "cells += by.row", ALL_HALVES),
    "a tile of which some is hidden is taken for open": (
        MANY_CUH,
        "(ALL_LANES, kind == OPEN)",
        "(ALL_LANES, true)",
        TWO_TILES,
    ),
    "columns that no key has are not zeros": (SHORT_CU, "if (size < D)", "if (false)", NARROW),
    "columns that no key of a warpgroup has are not zeros": (GROUPS, "if (a.size < D)", "if (false)", NARROW),
    "queries lie otherwise": (GROUPS, "PANEL * (OF_ROWS - 1)", "PANEL * OF_ROWS", ALL_HALVES),
    "both warpgroups have the same queries": (GROUPS, "many.warp / 4 * 64 * PANEL", "0", ALL_HALVES),
    "a warpgroup has the first columns of queries": (PRODUCTS, "c / 4 * A_ROWS * ROW", "0", ALL_HALVES),
    "a warpgroup has the first columns of keys": (PRODUCTS, "c / 4 * B_ROWS * ROW", "0", ALL_HALVES),
    "values are those of other keys": (GROUPS, "16 * n * ROW", "8 * n * ROW", ALL_HALVES),
    "values further on lie elsewhere": (GROUPS, "KEYS * PANEL * sizeof(u16)", "PANEL * sizeof(u16)", ALL_HALVES),
    "no wait for a stage": (GROUPS, "cp_async_wait<0>();", "", ALL_HALVES),
    "no barrier for a stage": (
        GROUPS,
        "show_to_products();\n        __syncthreads();",
        "show_to_products();",
        ALL_HALVES,
    ),
    "keys come too early": (GROUPS, "fetch_keys(next, stage ^ 1)", "fetch_keys(next, stage)", ALL_HALVES),
    "values come too early": (GROUPS, "fetch_values(tile, stage)", "fetch_values(tile, stage ^ 1)", ALL_HALVES),
    "scores of a warpgroup are read before they are there": (GROUPS, "wgmma_wait<1>(s);", "", ALL_HALVES),
    "scores add up to those of the tile before": (PRODUCTS, "wgmma_first(d, one", "wgmma(d, one", ALL_HALVES),
    "sums fade before they are there": (GROUPS, "wgmma_wait<0>(acc);\n            many", "many", ALL_HALVES),
    "weights are packed while they are multiplied": (
        GROUPS,
        "wgmma_wait<0>(acc);\n            many",
        PACKED_EARLY,
        ALL_HALVES,
    ),
    "the last sums are not there": (GROUPS, "wgmma_wait<0>(acc);\n    }", "}", ALL_HALVES),
    "registers of a warpgroup are not fenced": (
        GROUPS,
        "if (next >= tiles) break;\n            wgmma_fence(acc);",
        "if (next >= tiles) break;",
        ALL_HALVES,
    ),
    "rows of values are swizzled otherwise": (PRODUCTS, "(u64)1 << 62", "(u64)2 << 62", ALL_HALVES),
    "eight rows of values lie elsewhere": (PRODUCTS, "(u64)(1024 / 16) << 32", "(u64)(512 / 16) << 32", ALL_HALVES),
    "a fragment has the columns of another": (CELLS_CU, "OWN * D + i % 2 * 4", "OWN * D", FEW_HALVES),
    "queries become fragments before they are there": (
        CELLS_CU,
        "1.0f : LOG2_E);\n    }\n    __syncthreads();",
        "1.0f : LOG2_E);\n    }",
        FEW_HALVES,
    ),
    "fragments are read before they are there": (
        CELLS_CU,
        "two.y);\n    }\n    __syncthreads();",
        "two.y);\n    }",
        FEW_HALVES,
    ),
    "sums lie where queries are read": (CELLS_CU, "__syncthreads();  // queries have been read, too", "", FEW_HALVES),
    "a key has the value of its neighbour": (CELLS_CU, "2 * t + i % 2, 64 * m", "2 * t, 64 * m", FEW_HALVES),
    "rows of cells past the last one are read": (CELLS_CU, "min(key, key_count - 1)", "key", FEW_HALVES),
    "a warp's sums are left out": (CELLS_CU, "w < WARPS; w++) sum +=", "w < WARPS - 1; w++) sum +=", FEW_HALVES),
    "a warp's sums keep its own top": (CELLS_CU, "exp2f(powers.top[r] - top_of(g + 8 * r)) * DOWN", "DOWN", FEW_HALVES),
    "the last term of weights is left out": (
        CELLS_CU,
        "for (int i = 0; i < TERMS; i++) {\n                    const u32 weights",
        "for (int i = 0; i < TERMS - 1; i++) {\n                    const u32 weights",
        FEW_HALVES,
    ),
    "splits are added before they are there": (
        CELLS_CU,
        "u32 &number) {\n    __syncthreads();",
        "u32 &number) {",
        CELL_SPLITS,
    ),
    "the last split of a bunch is left out": (
        CELLS_CU,
        "if (p >= count) break;",
        "if (p + 1 >= count) break;",
        CELL_SPLITS,
    ),
    "a part keeps its own top": (
        CELLS_CU,
        "by = grown(parts[p].x - top)",
        "by = grown(parts[p].x - parts[0].x)",
        CELL_SPLITS,
    ),
    "bunches lie over each other": (CELLS_CU, "row.number * bunches + own", "row.number * bunches", CELL_SPLITS),
    "bunches begin with the first split": (
        CELLS_CU,
        "(int)a.splits, first, count,",
        "(int)a.splits, 0, count,",
        CELL_SPLITS,
    ),
    "queries are read before all columns are there": (
        WIDE_CU,
        "bias_of(a, batch, row);\n    }\n    __syncthreads();",
        "bias_of(a, batch, row);\n    }",
        LATENT,
    ),
    "keys come while queries are read": (
        WIDE_CU,
        "units[mine + g + 8]};\n    __syncthreads();",
        "units[mine + g + 8]};",
        LATENT,
    ),
    "a quarter of the scores is left out": (
        WIDE_CU,
        "for (int w = 1; w < SHARING",
        "for (int w = 1; w < SHARING - 1",
        LATENT,
    ),
    "scores are read before they are there": (
        WIDE_CU,
        "__syncthreads();\n        const int first",
        "const int first",
        LATENT,
    ),
    "scores of the other rows": (WIDE_CU, "scores[warp - part][n]", "scores[0][n]", LATENT),
    "every warp has the first columns of the keys": (
        WIDE_CU,
        "pair(k_row, 2 * (part * OWN_D + d)",
        "pair(k_row, 2 * d",
        LATENT,
    ),
    "every warp has the first columns of the values": (
        WIDE_CU,
        "2 * (part * OWN_E / 16 + e), turned",
        "2 * e, turned",
        LATENT,
    ),
    "values are overwritten while other warps read them": (
        WIDE_CU,
        "        __syncthreads();\n        tile = next;",
        "        tile = next;",
        LATENT,
    ),
    "no wait for values": (WIDE_CU, "p_low);\n        cp_async_wait<1>();", "p_low);", LATENT),
}


@pytest.mark.nightly(cases=15)
@pytest.mark.long
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_kernel_is_found(name):
    file, good, bad, found_by = FAULTS[name]
    backend = DriverBackend(FaultyDriver(file, good, bad))
    with by_warps() if file == SHORT_CU else nullcontext():
        result = run_case(found_by, backend, backend.device(0))
    wrong = result.outcome is Outcome.FAIL or result.difference.nmse > allowed_nmse(found_by)
    assert wrong, str(result.difference)
