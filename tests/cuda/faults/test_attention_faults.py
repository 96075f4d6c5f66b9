"""Planted faults in the kernels of attention on CUDA: a conformance case finds each of them."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from hocket.backends.cupy.backend import DriverBackend
from hocket.conformance import Outcome, run_case

from ...given.devices.attention import allowed_nmse, by_warps, case
from ...given.devices.emulation import FaultyDriver, needs_compiler

pytestmark = needs_compiler

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
        "last_block.cuh",
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
