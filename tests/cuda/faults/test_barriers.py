"""Every barrier that a kernel has is needed, and the order of accesses shows it: results may be right without."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from hocket.backends.cupy.device.driver import find_kernel_files
from hocket.backends.cupy.emulation.access_log import AccessLogBackend, AccessLogDriver
from hocket.backends.cupy.emulation.race_detector import list_races_between_launches
from hocket.backends.cupy.kernels import sorting
from hocket.backends.cupy.kernels.products import matmul, tiled
from hocket.backends.cupy.kernels.recurrent import delta_segments, gated_delta_net
from hocket.conformance import Outcome, run_case
from hocket.conformance.cases.case import parse_test_case

from ...given.devices.attention import by_candidates, by_warps
from ...given.devices.emulation import barriers, needs_compiler
from . import test_chain_faults, test_order

pytestmark = needs_compiler
DELTA_NET = (
    "gated_delta_net(q=f32[{0},1,64], k=f32[{0},1,64], v=f32[{0},1,{1}], g=f32[{0},1,1], beta=f32[{0},1], "
    "state=f32[1,{1},64])"
)
ATTENTION = "attention(q=f32[64,1,{1}], k=f16[{0},1,{1}], v=f16[{0},1,{1}], scale=0.1)"
MASKED = "attention(q=f32[64,1,8], k=f32[1,1,8], v=f32[1,1,8], mask=f32[64,1], scale=0.1)"
SPLIT = "attention(q=f32[64,1,{1}], k=f32[{0},1,{1}], v=f32[{0},1,8], scale=0.1)"  # into halves, before tiles
# For each file: its barriers, by number, that a case reaches.
REACHED = {
    "packed.cu": {
        "mul_mat(w=q4_K[16,512], x=f32[16,512])": (0, 1, 2, 3, 4),
        "get_rows(table=iq3_s[2,512], ids=i32[2])": (5,),  # a code book
    },
    "packed_few.cu": {"mul_mat(w=q8_0[8,2048], x=f32[1,2048])": (1, 2)},
    "tiled.cu": {"mul_mat(w=f16[32,128], x=f32[33,128])": (0, 1), "mul_mat(w=q8_0[32,64], x=f32[128,64])": (2,)},
    "warpgroups.cu": {
        "mul_mat(w=bf16[32,64], x=f32[257,64])": (0, 1, 2, 3),
        "mul_mat(w=iq3_s[130,256], x=f32[512,256])": (4,),  # a code book
        "mul_mat(w=q8_0[130,64], x=f32[512,64])": (5,),  # unpacked once
    },
    "clusters.cu": {"mul_mat(w=bf16[130,64], x=f32[130,64])": (0,)},
    "products.cu": {"mul_mat(w=f32[32,64], x=f32[33,64])": (0, 1)},
    "prelude.cuh": {"softmax(x=f32[1,2,256])": (0, 2, 3), "norm(x=f32[2,1024])": (1,)},
    "gated_delta_net.cu": {DELTA_NET.format(2, 32): (0,)},
    "gated_delta_net_prepare.cu": {
        DELTA_NET.format(70, 32): (0, 1, 2, 3, 4, 6),
        "gated_delta_net(q=f32[70,1,64], k=f32[70,1,64], v=f32[70,2,16], g=f32[70,2,1], beta=f32[70,2], "
        "state=f32[2,16,64])": (5,),
        DELTA_NET.format(70, 16).replace("g=f32[70,1,1]", "g=f32[70,1,64]"): (7, 8, 9),  # gates per channel
    },
    "gated_delta_net_scan.cu": {
        DELTA_NET.format(70, 16): (0, 1),
        DELTA_NET.format(70, 32): (0, 1),  # in a cluster
    },
    "gated_delta_net_segments.cu": {DELTA_NET.format(130, 64): (0, 1)},
    "attention_few.cu": {"attention(q=f32[1,4,64], k=f32[32,1,64], v=f32[32,1,64], scale=0.1)": (0, 1, 2, 3)},
    "attention_cells.cu": {
        "attention(q=f32[1,4,64], k=f16[32,1,64], v=f16[32,1,64], scale=0.1)": (0, 1, 5, 6),
    },
    "last_block.cuh": {"attention(q=f32[1,4,64], k=f16[70,1,64], v=f16[70,1,64], scale=0.1)": (0, 1)},  # two splits
    "attention_short.cu": {ATTENTION.format(300, 64): (0, 1, 3), ATTENTION.format(100, 56): (2,)},
    "attention_warpgroups.cu": {ATTENTION.format(300, 64): (1,), ATTENTION.format(100, 56): (0,)},
    "attention_roles.cu": {ATTENTION.format(300, 64): (0,), ATTENTION.format(100, 56): (1,)},
    "attention_around.cu": {MASKED: (0,), "attention(q=f32[1,1,8], k=f32[512,1,8], v=f32[512,1,8], scale=0.1)": (1,)},
    "dense.cu": {"mul_mat(w=f32[4,512], x=f32[1,512])": (2,)},
    "attention_tiles.cu": {SPLIT.format(1, 8): (0, 1, 2, 4), SPLIT.format(65, 8): (3, 5)},  # a tile of keys, two
    "attention_wide.cu": {SPLIT.format(1, 264): (0, 1, 2, 3, 4), SPLIT.format(17, 264): (5,)},  # the same
    "routes.cu": {
        "mul_mat_id(w=q8_0[2,8,32], x=f32[10,1,32], ids=i32[10,1])": (0, 2, 3, 4),
        "mul_mat_id(w=q8_0[1100,1,32], x=f32[12,1,32], ids=i32[12,1])": (1,),  # more experts than threads
    },
    "recurrences.cu": {
        "gated_linear_attn(k=f32[1,2,1,16], v=f32[1,2,1,1], q=f32[1,2,1,16], g=f32[1,2,1,16], state=f32[1,1,16,1], "
        "scale=0.5)": (0, 1),
    },
    "reductions.cu": {'reduce(x=f32[1,256], kind="max")': (0,)},
    "rows.cu": {"count_equal(a=i32[64], b=i32[64])": (0,), "argmax(x=f32[1,256])": (1,)},
    "token_sampling.cu": {
        "sample_token(logits=f32[1,128], ids=i32[1,128], limit=i32[1], numbers=i64[1,7])": tuple(range(8)),
    },
    "sorting.cu": {"argsort(x=f32[2,100])": (0, 1, 2), "argsort(x=f32[1,2049])": (3,)},  # one run, two merged
}
# Kernels that an emulated device chooses only so.
CHOICES = {
    "attention_short.cu": by_warps,
    "attention_roles.cu": by_candidates,
    "gated_delta_net_segments.cu": by_candidates,
}
# Barriers that no test here drops, and why.
LEFT_OUT = {
    ("product_roles.cu", 0): "lanes come to the barrier of the cluster together: orders no memory",
    ("product_roles.cu", 1): "a warp waits for its products together, just before: orders no memory",
    **{("attention_cells.cu", n): "no load waits behind a product: orders no memory" for n in (2, 3, 4)},
    ("attention_many.cuh", 0): "few loads at once, for which there are registers: orders no memory",
    ("collective.cu", 1): "all are told before anybody waits, however threads take turns: orders no memory",
}
# No noted access shows the loss of one of these barriers, but this message does.
WITHOUT_ACCESSES = {
    ("attention_few.cu", 0): "touches memory that is not its own",  # the emulation stops the launch
    ("warpgroups.cu", 4): "the replay of the same inputs over other leftovers gives other bits",
    # Threads that count too few survivors end before the other barriers.
    ("token_sampling.cu", 2): "deadlock",
    # g++ calls once for a load and a store of one address in a basic block, so `G[i] = sum += G[i]` is only a load.
    ("gated_delta_net_prepare.cu", 8): "the replay of the same inputs over other leftovers gives other bits",
    ("token_sampling.cu", 7): "the replay of the same inputs over other leftovers gives other bits",
}
# Other tests drop the barriers of chains and of collectives.
ELSEWHERE = [*test_chain_faults.BARRIERS, *test_order.BARRIERS]


@pytest.fixture(autouse=True)
def few_tiles(monkeypatch):
    """Are enough for packed weights to become bfloat16, some more for warpgroups, and chunks for a block.

    A row that is sorted has two runs early, and few slots of experts have tiles.
    """
    monkeypatch.setattr(gated_delta_net, "FULL_DEVICE_BLOCKS", 1)
    monkeypatch.setattr(delta_segments, "MIN_SEGMENTS", 3)
    monkeypatch.setattr(delta_segments, "MIN_SEGMENT_CHUNKS", 1)
    monkeypatch.setattr(matmul, "has_few_slots_per_expert", lambda call: False)
    monkeypatch.setattr(tiled, "MIN_BF16_TILES", 1)
    monkeypatch.setattr(tiled, "FULL_DEVICE_TILES", 3)
    monkeypatch.setattr(tiled, "MIN_SPLIT_COLUMNS", 32)
    monkeypatch.setattr(tiled, "MIN_UNPACKED_ENTRIES", 300)
    monkeypatch.setattr(sorting, "MAX_SINGLE_BLOCK_ITEMS", sorting.ITEMS_PER_BLOCK)


CASES = [(file, n, case) for file, cases in REACHED.items() for case, numbers in cases.items() for n in numbers]


def check_case(file, case, dropped=("", 0)):
    """Return the result of the case and the unordered accesses."""
    driver = AccessLogDriver(dropped)
    backend = AccessLogBackend(driver)
    with CHOICES.get(file, nullcontext)():
        result = run_case(parse_test_case(case), backend, backend.device(0))
    return result, list_races_between_launches(driver.take_log(), driver.memory)


@pytest.mark.nightly(cases=24)
@pytest.mark.long
@pytest.mark.parametrize(("file", "case"), sorted({(file, case) for file, _, case in CASES}))
def test_with_all_barriers_accesses_are_in_order(file, case):
    result, pairs = check_case(file, case)
    assert (result.outcome, pairs) == (Outcome.PASS, [])


@pytest.mark.nightly(cases=12)
@pytest.mark.long
@pytest.mark.parametrize(("file", "number", "case"), CASES)
def test_a_barrier_that_is_dropped_is_missed(file, number, case):
    result, pairs = check_case(file, case, (file, barriers(file)[number]))
    if (file, number) in WITHOUT_ACCESSES:
        assert WITHOUT_ACCESSES[file, number] in result.why
        return
    assert pairs, result.why
    assert all("in no order with" in pair for pair in pairs)


def test_every_barrier_of_all_files_is_dropped_by_a_test_or_left_out():
    dropped = {(file, number) for file, number, _ in (*CASES, *ELSEWHERE)}
    assert dropped.isdisjoint(LEFT_OUT)
    assert dropped | set(LEFT_OUT) == {
        (file, number) for file in find_kernel_files() for number in range(len(barriers(file)))
    }
