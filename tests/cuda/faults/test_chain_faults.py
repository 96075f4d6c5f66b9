"""Faults planted in kernels that only chains launch.

The emulation finds each fault, or the results differ from the results of single instructions. The barriers of the
kernels order all accesses.
"""

from __future__ import annotations

import re

import pytest

from hocket.backends.cupy.backend import DriverBackend
from hocket.backends.cupy.emulation.access_log import AccessLogBackend, AccessLogDriver
from hocket.backends.cupy.emulation.race_detector import list_races_between_launches

from ...given.devices.chains import CHAINS, assert_equal_runs, run_graph
from ...given.devices.emulation import PAST_END, WRONG_RESULTS, barriers, finding, needs_compiler

pytestmark = needs_compiler


def is_right(name: str, backend: DriverBackend) -> bool:
    chain = CHAINS[name]
    try:
        assert_equal_runs(
            run_graph(chain.graph(False), True, backend=backend), run_graph(chain.graph(False), False), chain.tolerance
        )
    except AssertionError:
        return False
    return True


ROUTER, BIASED, SCALED = "router", "router with a bias", "router of shares as they are"
PACKED, GATED, FLOAT = "answers, packed", "answers, packed, and a gated one", "answers, float, and a gated one"
UNITS, FLOAT_UNITS = "unit of all experts, packed", "unit of all experts, float"
NORM, NORM_OF_HEADS = "norm before products", "norm of large heads before a product"
FLOAT_NORM, FLOAT_GATES = "norm before float products", "gates before a float unit"
DELTA, DELTA_MANY = "delta rule and logits", "delta rule of several sequences"
MANY, HEADS, ROTATED = "answers of many, float", "heads of attention to halves", "turned heads of attention"
PLACED, LARGE_PLACED = "attention and its heads", "attention and its large heads"
ROUTED, LAST_BLOCK, CHOOSING = "products and router", "last_block.cuh", "routing_epilogue.cuh"
CELLS, PLACED_HEADS = "attention_cells.cu", "placed_heads.cuh"
PLANTS = {
    "the sum is that of one lane": ("routing.cuh", "sum = warp_sum(sum);", "", ROUTER),
    "the chosen stay to be chosen": ("routing.cuh", "if (item[i] == first) item[i] = LAST;", "", ROUTER),
    "what is beyond the experts is chosen": ("routing.cuh", "number < experts ? item_of(", "true ? item_of(", BIASED),
    "the bias counts for shares": (
        "routing.cuh",
        "numbers[number] = x[i];",
        "numbers[number] = x[i] += number < experts ? a.bias[number] : 0.0f;",
        BIASED,
    ),
    "the bias of the lane": ("routing.cuh", "x[i] + a.bias[number]", "x[i] + a.bias[lane]", BIASED),
    "a sum is not limited": ("routing.cuh", "sum < (float)a.least ? (float)a.least : ", "", ROUTER),
    "shares are not scaled": ("routing.cuh", "share * (float)a.factor + (float)a.shift", "share", SCALED),
    "shares of another token": ("routes.cuh", "shares[token * used + entry]", "shares[entry]", PACKED),
    "the other expert counts in full": (
        "routes.cuh",
        "return gate ? logistic(",
        "return gate ? 1.0f + 0.0f * (",
        GATED,
    ),
    "the other expert is forgotten": ("routes.cuh", "(int)used + (x ? 1 : 0)", "(int)used", GATED),
    "x of the first entry": ("packed_few.cu", "skipped = own_entry * padded;", "skipped = 0;", PACKED),
    "x of entries overlap": ("packed_few.cu", "padded = (most * P::CHUNK + 7) / 8 * 8", "padded = most", GATED),
    "the expert of the first entry": (
        "packed_few.cu",
        "matrix_of(entry * used + own_entry)",
        "matrix_of(entry * used)",
        PACKED,
    ),
    "the other expert's weights are those of the chosen": (
        "packed_few.cu",
        "SUMS ? own_entry >= used :",
        "SUMS ? 0 :",
        GATED,
    ),
    "one of the entries is left out": (
        "packed_few.cu",
        "for (int k = 1; k < joined; k++) result",
        "for (int k = 2; k < joined; k++) result",
        PACKED,
    ),
    "the other expert's rows are those of the first token": (
        "packed_few.cu",
        "a.summed.x + entry * a.summed.x_step",
        "a.summed.x",
        GATED,
    ),
    "the other expert's unit has the rows of a slot": (
        "packed_few.cu",
        "a.used == 1 || is_other ?",
        "a.used == 1 ?",
        UNITS,
    ),
    "the other expert's unit has the weights of the chosen": (
        "packed_few.cu",
        "at.which + (is_other ? 2 : 0)];\n            unit",
        "at.which];\n            unit",
        UNITS,
    ),
    "the other expert's unit is written over that of the chosen": (
        "packed_few.cu",
        "made = a.product[at.which + (is_other ? 2 : 0)]",
        "made = a.product[at.which]",
        UNITS,
    ),
    "the other expert has the first one's weights": (
        "dense.cu",
        "p = a.product[chosen ? 0 : 1];",
        "p = a.product[0];",
        FLOAT,
    ),
    "queries and keys of the first key head": (
        "computed_inputs.cuh",
        "(part * a.from.key_heads + key_head) * D",
        "part * a.from.key_heads * D",
        DELTA,
    ),
    "values of the first rows": ("computed_inputs.cuh", "* D + row0 + 4", "* D + 4", DELTA),
    "the first block keeps rows": (
        "computed_inputs.cuh",
        "if (number + 1 < gridDim.x",
        "if (number && number + 1 < gridDim.x",
        DELTA,
    ),
    "rows are kept once": ("computed_inputs.cuh", "if (threadIdx.x == 0) *taken = 0;", "", DELTA),
    "rows of the first key head are kept": ("computed_inputs.cuh", "a, 0, key_head, 0)", "a, 0, 0, 0)", DELTA),
    "blocks take numbers of all key heads": (
        "computed_inputs.cuh",
        "n * a.from.key_heads + key_head;",
        "n * a.from.key_heads;",
        DELTA,
    ),
    "gates of the first token": ("computed_inputs.cuh", "(int)threadIdx.x == t)", "t == 0)", DELTA_MANY),
    "values are shared": (
        "computed_inputs.cuh",
        "channel, is_shared, is_value,",
        "channel, is_shared, is_there,",
        DELTA,
    ),
    "computed rows of the first token": ("dense.cu", "n * blocks + mine) * 8", "mine) * 8", FLOAT_GATES),
    "halves of computed blocks are exchanged": (
        "dense.cu",
        "to[0] = brought[0], to[4] = brought[1]",
        "to[4] = brought[0], to[0] = brought[1]",
        FLOAT_NORM,
    ),
    "warps past the last row go on": ("dense.cu", "        if (!real && parts == 1) return;", "", FLOAT_GATES),
    "a warp's last entry alone": (
        "dense.cu",
        "result[r] = fmaf(share, warp_sum(sum[r][0]), result[r])",
        "result[r] = share * warp_sum(sum[r][0])",
        MANY,
    ),
    "warps do not wait for each other": (
        "dense.cu",
        "    __syncthreads();\n    if (threadIdx.x >= OWN",
        "    if (threadIdx.x >= OWN",
        FLOAT,
    ),
    "the other expert's unit has the chosen ones' weights": (
        "dense.cu",
        "int which = is_other ? 2 : 0;",
        "int which = 0;",
        FLOAT_UNITS,
    ),
    "keys take the place of values": (
        "rotary.cu",
        "place_in_block(a.value, blockIdx.x - a.values",
        "place_in_block(a.key, blockIdx.x - a.values",
        HEADS,
    ),
    "queries are those of keys": ("rotary.cu", "if (blockIdx.x < a.keys)", "if (blockIdx.x < a.keys - 1)", ROTATED),
    "values are placed as keys": (PLACED_HEADS, "put_into_cache(a.value,", "put_into_cache(a.key,", PLACED),
    "nobody stores the new key": (PLACED_HEADS, "(int)(id / keys % splits) : 0", "-1 : 0", PLACED),
    "queries of the first key head": (PLACED_HEADS, "group * shared + r)", "r)", PLACED),
    "the key of the first head": (PLACED_HEADS, "place(a, (i64)group,", "place(a, (i64)0,", PLACED),
    "queries lie over each other": (PLACED_HEADS, "row = rows + r * columns;", "row = rows;", PLACED),
    "a warp leaves queries out": (
        PLACED_HEADS,
        "r < shared; r += warps",
        "r < min(shared, warps); r += warps",
        LARGE_PLACED,
    ),
    "half of the squares of a long head": ("heads.cuh", "part ? total + sum : sum", "sum", LARGE_PLACED),
    "a number is not reset": (LAST_BLOCK, "if (threadIdx.x == 0) *word = 0;", "", PLACED),
    "the last block but one adds splits": (LAST_BLOCK, "(int)number + 1 != count", "(int)number + 2 != count", PLACED),
    "bunches take one number": (CELLS, "comes_last(numbers + own,", "comes_last(numbers,", PLACED),
    "key heads take one number": (CELLS, "gridDim.y + blockIdx.y)", "gridDim.y)", PLACED),
    "the last block but one chooses experts": (
        LAST_BLOCK,
        "(int)number + 1 != count",
        "(int)number + 2 != count",
        ROUTED,
    ),
    "scores of tokens lie over each other": (CHOOSING, "room + token * 32 * EACH", "room", ROUTED),
    "experts of the first token": (CHOOSING, "token < (int)a.tokens", "token < 1", ROUTED),
    "the norm of the first row": (
        "packed_few.cu",
        "numbers + token * Prologue::NUMBERS, brought",
        "numbers, brought",
        NORM,
    ),
    "the first row is brought": ("packed_few.cu", "const int n = eight % N,", "const int n = 0,", NORM),
    "nobody writes what something else reads": ("packed_few.cu", "blockIdx.x == 0 && n == token", "false", NORM),
    "a row is known in part": (
        "packed_few.cu",
        "a.prologue, n, (int)a.blocks * 32,",
        "a.prologue, n, (int)a.blocks,",
        NORM,
    ),
    "each eight of heads is the first": (
        "packed_few.cu",
        "brought[i], token, (int)a.blocks * 32, block,",
        "brought[i], token, (int)a.blocks * 32, 0,",
        NORM_OF_HEADS,
    ),
    "the last columns of a lane lie too near": (
        "lanes.cuh",
        "high = *(const float4 *)(from + 16)",
        "high = *(const float4 *)(from + 4)",
        NORM,
    ),
    "the last columns of a lane are written too near": (
        "lanes.cuh",
        "*(float4 *)(to + 16)",
        "*(float4 *)(to + 4)",
        NORM,
    ),
}


STOPPED_CHAINS = {
    "what is beyond the experts is chosen": PAST_END,
    "warps past the last row go on": PAST_END,
    "queries are those of keys": "place_heads.*touches memory",  # of values, at address 0
}
"""Messages of the emulation, which stops these launches; all other mistakes give wrong results."""


@pytest.mark.nightly(cases=15)
@pytest.mark.long
@pytest.mark.parametrize("name", PLANTS)
def test_a_mistake_in_a_chain_is_found(name):
    file, old, new, chain = PLANTS[name]
    assert re.search(
        STOPPED_CHAINS.get(name, WRONG_RESULTS), finding(file, old, new, lambda backend: is_right(chain, backend))
    )


REACHED = {
    "routing.cuh": {ROUTER: (0,)},
    "last_block.cuh": {ROUTED: (0,)},
    "dense.cu": {FLOAT: (3,), FLOAT_NORM: (0, 1)},
    "heads.cuh": {HEADS: (0,), PLACED: (1,)},
    "placed_heads.cuh": {PLACED: (0, 1)},
    "packed_few.cu": {NORM: (0,)},
    "computed_inputs.cuh": {DELTA: (0,)},
}
"""For each file: its barriers, by number, that a chain reaches; ``test_barriers.py`` knows whether those are all."""
BARRIERS = [(file, n, chain) for file, chains in REACHED.items() for chain, numbers in chains.items() for n in numbers]


def disorders(chain: str, dropped: tuple[str, int] = ("", 0)) -> list[str]:
    driver = AccessLogDriver(dropped)
    run_graph(CHAINS[chain].graph(False), True, backend=AccessLogBackend(driver))
    return list_races_between_launches(driver.take_log(), driver.memory)


@pytest.mark.long
@pytest.mark.parametrize("chain", [ROUTER, ROUTED, PACKED, FLOAT, UNITS, HEADS, NORM, PLACED, LARGE_PLACED])
def test_accesses_of_a_chain_are_in_order(chain):
    assert disorders(chain) == []


@pytest.mark.long
@pytest.mark.parametrize(("file", "number", "chain"), BARRIERS)
def test_a_barrier_of_a_chain_that_is_dropped_is_missed(file, number, chain):
    assert disorders(chain, (file, barriers(file)[number]))
