"""Mistakes planted in kernels for warps with roles; each is found by a check of the emulation that is named here."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from hocket.backends.cupy.backend import DriverBackend
from hocket.backends.cupy.emulation.access_log import AccessLogBackend, AccessLogDriver
from hocket.backends.cupy.emulation.emulated_driver import EmulatedDriver
from hocket.backends.cupy.emulation.race_detector import list_races_between_launches
from hocket.backends.cupy.kernels.products import tiled
from hocket.conformance import Outcome, run_case
from hocket.conformance.cases.case import parse_test_case

from ...given.devices.attention import by_candidates
from ...given.devices.disordered import RacyDriver
from ...given.devices.emulation import IN_FLIGHT, WRONG_RESULTS, FaultyDriver, needs_compiler
from ...given.devices.products import tiles_of

pytestmark = [needs_compiler, pytest.mark.long()]

ATTENTION, PRODUCTS = "attention_roles.cu", "product_roles.cu"
LONG_CACHE = "attention(q=f32[66,1,64], k=f16[390,1,64], v=f16[390,1,64], scale=0.125)"
MASKED = "attention(q=f32[66,1,64], k=f16[270,1,64], v=f16[270,1,64], mask=f32[66,270], scale=0.125, inputs=infinities)"
"""Four tiles of keys, so that each of two stages is used again, and three tiles that a mask hides in part."""
TWO_TILES = "mul_mat(w=bf16[130,130], x=f32[260,130], exact=false)"
"""Two tiles of entries for a cluster of two blocks, with six stages in all where four have room."""
THREE_TILES = "mul_mat(w=bf16[8,65], x=f32[516,65], exact=false)"
ONE_STAGE = "mul_mat(w=bf16[130,60], x=f32[130,60], exact=false)"
"""Three tiles for a single block, which uses the last stage of the first again; and a single stage."""
BEGIN_SUMS = "            wgmma_fence(acc);\n            begin_sums(number);\n            pass_turn"
NEXT_ITEM = """        for (int item = begin; item < items; item += clusters) {
            const i64 first = ((i64)(item / count) * blocks + rank) * HIGH;
"""
ZEROS = """            float sum[128];
#pragma unroll
            for (int i = 0; i < 128; i++) sum[i] = 0.0f;
"""
STOPPED = {
    "a consumer does not await its turn": (
        ATTENTION,
        "sync_named(TURN + mine, 256);",
        "",
        LONG_CACHE,
        "arrives twice at named barrier 1",
    ),
    "a consumer does not pass its turn": (
        ATTENTION,
        "if (mine + 1 < CONSUMERS || note & HAS_NEXT) arrive",
        "if (note & HAS_NEXT && mine == 7) arrive",
        LONG_CACHE,
        "deadlock: 128 threads wait at an mbarrier, for 4 arrivals",
    ),
    "the turn is passed once more than awaited": (
        ATTENTION,
        "if (mine + 1 < CONSUMERS || note & HAS_NEXT) arrive",
        "arrive",
        LONG_CACHE,
        "ends while 128 of 256 threads are missing at named barrier 1",
    ),
    "nobody gives the first turn": (
        ATTENTION,
        "if (mine + 1 == CONSUMERS) arrive_named",
        "if (false) arrive_named",
        LONG_CACHE,
        "deadlock: 128 threads wait at an mbarrier, for 8 arrivals",
    ),
    "a turn is for other threads": (
        ATTENTION,
        "sync_named(TURN + mine, 256)",
        "sync_named(TURN + mine, 128)",
        LONG_CACHE,
        "threads share named barrier",
    ),
    "producers wait for the wrong phase": (
        ATTENTION,
        "STAGES % 2 ^ 1)",
        "STAGES % 2)",
        LONG_CACHE,
        "deadlock: [0-9]+ threads wait at an mbarrier",
    ),
    "consumers wait for the wrong phase": (
        ATTENTION,
        "(&full[number % STAGES], number / STAGES % 2)",
        "(&full[number % STAGES], number / STAGES % 2 ^ 1)",
        LONG_CACHE,
        "deadlock: 384 threads wait at an mbarrier, for 64 arrivals",
    ),
    "a stage is full for fewer arrivals": (
        ATTENTION,
        "init_mbarrier(&full[s], producers)",
        "init_mbarrier(&full[s], producers / 2)",
        LONG_CACHE,
        "deadlock: 384 threads wait at an mbarrier, for 32 arrivals",
    ),
    "a stage is empty only for more arrivals": (
        ATTENTION,
        "init_mbarrier(&empty[s], consumers)",
        "init_mbarrier(&empty[s], consumers + 1)",
        LONG_CACHE,
        "deadlock: [0-9]+ threads wait at an mbarrier",
    ),
    "a warp does not give its stage back": (
        ATTENTION,
        "if (threadIdx.x % 32 == 0) arrive_at(&empty",
        "if (threadIdx.x % 128 == 0) arrive_at(&empty",
        LONG_CACHE,
        "deadlock: [0-9]+ threads wait at an mbarrier, for [0-9]+ arrivals",
    ),
    "producers keep their registers": (
        ATTENTION,
        "release_registers<FOR_COPIES>();",
        "",
        LONG_CACHE,
        "deadlock: a warp waits for registers, and 0 are free",
    ),
    "registers are more than a multiprocessor has": (
        ATTENTION,
        "FOR_PRODUCTS = 232",
        "FOR_PRODUCTS = 240",
        LONG_CACHE,
        "deadlock: a warp waits for registers",
    ),
    "one warp of a warpgroup keeps its registers": (
        ATTENTION,
        "release_registers<FOR_COPIES>();",
        "if (threadIdx.x / 32 != 4 * CONSUMERS) release_registers<FOR_COPIES>();",
        LONG_CACHE,
        "deadlock: a warp waits for registers",
    ),
    "copies are handed over before they are there": (ATTENTION, "cp_async_wait<0>();", "", LONG_CACHE, IN_FLIGHT),
    "registers of products are not fenced": (
        ATTENTION,
        "            wgmma_fence(acc);\n            begin_scores(number + 1);",
        "            begin_scores(number + 1);",
        LONG_CACHE,
        "registers no wgmma.fence stands before",
    ),
    "keys come from a stale stage": (
        ATTENTION,
        "begin_scores(number + 1)",
        "begin_scores(number)",
        LONG_CACHE,
        WRONG_RESULTS,
    ),
    "values come from a stale stage": (
        ATTENTION,
        "begin_sums(number);\n            pass_turn",
        "begin_sums(number + 1);\n            pass_turn",
        LONG_CACHE,
        WRONG_RESULTS,
    ),
    "the note of another tile": (
        ATTENTION,
        "note = notes[(number + 1) % STAGES]",
        "note = notes[number % STAGES]",
        MASKED,
        "deadlock: 256 threads wait at an mbarrier, for 64 arrivals",
    ),
    "a tile of which some is hidden is noted as open": (
        ATTENTION,
        "(open ? IS_OPEN : 0)",
        "IS_OPEN",
        MASKED,
        WRONG_RESULTS,
    ),
    "both consumers have the same queries": (
        ATTENTION,
        "operand_at(q + mine * 64 * PANEL)",
        "operand_at(q)",
        LONG_CACHE,
        WRONG_RESULTS,
    ),
    "the second consumer does not stay behind": (
        PRODUCTS,
        "if (mine > 0 && stays_behind) sync_named(BEHIND, OF_CONSUMERS);",
        "",
        TWO_TILES,
        "arrives twice at named barrier 1",
    ),
    "the second consumer may never begin": (
        PRODUCTS,
        "if (mine == 0 && stays_behind && step == LEAD - 1) arrive_named(BEHIND, OF_CONSUMERS);",
        "",
        TWO_TILES,
        "deadlock: 129 threads wait at an mbarrier, for 1 arrivals",
    ),
    "a lead that is longer than the columns": (
        PRODUCTS,
        "steps > STAGES - LEAD",
        "true",
        ONE_STAGE,
        "deadlock: of 384 threads 256 wait at the barrier of the cluster",
    ),
    "a lead that takes the turn of the next tile": (
        PRODUCTS,
        "steps > STAGES - LEAD",
        "steps >= LEAD",
        THREE_TILES,
        "arrives twice at named barrier 1",
    ),
    "the producer waits for the wrong phase": (
        PRODUCTS,
        "STAGES % 2 ^ 1)",
        "STAGES % 2)",
        TWO_TILES,
        "deadlock: .*wait at an mbarrier",
    ),
    "products wait for the wrong phase": (
        PRODUCTS,
        "wait_for_phase(&room.full[stage], number / STAGES % 2);",
        "wait_for_phase(&room.full[stage], number / STAGES % 2 ^ 1);",
        TWO_TILES,
        "arrives where nobody is missing",
    ),
    "a stage is empty for fewer arrivals": (
        PRODUCTS,
        "4 * CONSUMERS * blocks)",
        "4 * CONSUMERS)",
        TWO_TILES,
        "arrives where nobody is missing",
    ),
    "bytes of weights are not expected": (
        PRODUCTS,
        "(HIGH + entries) * ENTRY",
        "entries * ENTRY",
        TWO_TILES,
        "copies more bytes than an mbarrier expects",
    ),
    "a stage is given back to its own block alone": (
        PRODUCTS,
        "&room.empty[stage % STAGES], threadIdx.x % 32)",
        "&room.empty[stage % STAGES], rank)",
        TWO_TILES,
        WRONG_RESULTS,
    ),
    "the copying warps keep their registers": (
        PRODUCTS,
        "release_registers<FOR_COPIES>();",
        "",
        TWO_TILES,
        "deadlock: a warp waits for registers",
    ),
    "products take more registers than there are": (
        PRODUCTS,
        "FOR_PRODUCTS = 232",
        "FOR_PRODUCTS = 248",
        TWO_TILES,
        "deadlock: a warp waits for registers",
    ),
    "a block ends while others arrive at it": (
        PRODUCTS,
        "        }\n    }\n    sync_cluster();  // nobody arrives here any more\n",
        "        }\n    }\n",
        TWO_TILES,
        "of a block that has ended",
    ),
    "a stale stage of entries": (
        PRODUCTS,
        "operand_at(room.x[stage])",
        "operand_at(room.x[(stage + 1) % STAGES])",
        TWO_TILES,
        WRONG_RESULTS,
    ),
    "both consumers have the same weights": (
        PRODUCTS,
        "room.w[stage][mine * 64]",
        "room.w[stage][0]",
        TWO_TILES,
        WRONG_RESULTS,
    ),
    "all blocks have the weights of the first": (
        PRODUCTS,
        "* (int)blocks + (int)rank, last)",
        "* (int)blocks, last)",
        TWO_TILES,
        WRONG_RESULTS,
    ),
    "weights lie otherwise than products take them": (
        PRODUCTS,
        "swizzled(row, eight)",
        "eight * 8",
        TWO_TILES,
        WRONG_RESULTS,
    ),
    "columns past the last are no zeros": (
        PRODUCTS,
        "column + 2 * i + 1 < a.columns ? from[2 * i + 1].bits : 0",
        "column + 2 * i < a.columns ? from[2 * i].bits : 0x7fc0",
        ONE_STAGE,
        WRONG_RESULTS,
    ),
    "sums of the tile before stay": (
        PRODUCTS,
        NEXT_ITEM + ZEROS,
        ZEROS + NEXT_ITEM,
        TWO_TILES,
        WRONG_RESULTS,
    ),
}
"""File, text, the mistake in its place, the case that finds it, and the pattern of the message."""
READ_TOO_EARLY = "a load of device 0 at wgmma.cuh:.*, in no order with a store of device 0 at "
WRITTEN_OVER = "a store of device 0 at {}:.*, in no order with a load of device 0 at wgmma.cuh"
RACES = {
    "products do not see copies": (
        ATTENTION,
        "        show_to_products();\n        arrive_at(&full",
        "        arrive_at(&full",
        LONG_CACHE,
        READ_TOO_EARLY + ATTENTION,
    ),
    "products do not see queries": (
        ATTENTION,
        "    show_to_products();  // behind",
        "    // behind",
        LONG_CACHE,
        READ_TOO_EARLY + "attention.cuh",
    ),
    "keys are given back while products read them": (
        ATTENTION,
        "            wgmma_wait<1>(s);\n            key_ring.give_back(number);\n",
        "            key_ring.give_back(number);\n            wgmma_wait<1>(s);\n",
        LONG_CACHE,
        WRITTEN_OVER.format(ATTENTION),
    ),
    "values are given back while products read them": (
        ATTENTION,
        "            wgmma_wait<0>(acc);\n            if (number > 0) value_ring.give_back(number - 1);\n",
        "            if (number > 0) value_ring.give_back(number - 1);\n            wgmma_wait<0>(acc);\n",
        LONG_CACHE,
        WRITTEN_OVER.format(ATTENTION),
    ),
    "a stage is empty before all warps have given it back": (
        ATTENTION,
        "init_mbarrier(&empty[s], consumers)",
        "init_mbarrier(&empty[s], consumers / 2)",
        LONG_CACHE,
        WRITTEN_OVER.format(ATTENTION),
    ),
    "values are multiplied before they are there": (
        ATTENTION,
        "            value_ring.wait_until_full(number);\n" + BEGIN_SUMS,
        BEGIN_SUMS,
        LONG_CACHE,
        READ_TOO_EARLY + ATTENTION,
    ),
    "a note is written after its stage is handed over": (
        ATTENTION,
        "                key_ring.hand_over(number);",
        "                key_ring.hand_over(number);\n"
        "                if (threadIdx.x == OF_CONSUMERS) notes[number % STAGES] = note | has_next;",
        LONG_CACHE,
        "a load .* at attention_roles.cu:.*, in no order with a store .* at attention_roles.cu",
    ),
    "entries are given back while products read them": (
        PRODUCTS,
        "                wgmma_wait<1>(sum);\n                if (step > 0) give_back(number - 1);\n",
        "                if (step > 0) give_back(number - 1);\n                wgmma_wait<1>(sum);\n",
        THREE_TILES,
        WRITTEN_OVER.format("cluster.cuh"),
    ),
    "the last entries are given back while products read them": (
        PRODUCTS,
        "            wgmma_wait<0>(sum);\n            give_back(number - 1);\n",
        "            give_back(number - 1);\n            wgmma_wait<0>(sum);\n",
        THREE_TILES,
        WRITTEN_OVER.format("cluster.cuh"),
    ),
    "a warp gives a stage back for all of its warpgroup": (
        PRODUCTS,
        "            __syncwarp();\n            if (threadIdx.x % 32 < blocks) arrive",
        "            if (threadIdx.x % 32 < blocks) arrive",
        THREE_TILES,
        WRITTEN_OVER.format("cluster.cuh"),
    ),
}
"""File, text, the mistake in its place, the case, and the pattern of the two accesses that have no order."""


@pytest.fixture(autouse=True)
def use_candidates(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(EmulatedDriver, "count_multiprocessors", lambda self, on: 1)
    with by_candidates(), tiles_of(lambda *_: (tiled.CLUSTER_TILE, 1)):
        yield


def find_races(case: str, *edit: str) -> list[str]:
    driver = RacyDriver(*edit) if edit else AccessLogDriver()
    backend = AccessLogBackend(driver)
    run_case(parse_test_case(case), backend, backend.device(0))
    return list_races_between_launches(driver.take_log(), driver.memory)


@pytest.mark.nightly(cases=2)
@pytest.mark.parametrize("case", [LONG_CACHE, MASKED, ONE_STAGE, THREE_TILES, TWO_TILES])
def test_without_a_mistake_nothing_is_found(case: str) -> None:
    backend = DriverBackend(EmulatedDriver())
    assert run_case(parse_test_case(case), backend, backend.device(0)).outcome is Outcome.PASS
    assert find_races(case) == []


@pytest.mark.nightly(cases=7)
@pytest.mark.parametrize("name", STOPPED)
def test_a_mistake_stops_the_launch_or_changes_results(name: str) -> None:
    file, good, bad, case, message = STOPPED[name]
    backend = DriverBackend(FaultyDriver(file, good, bad))
    result = run_case(parse_test_case(case), backend, backend.device(0))
    assert result.outcome is Outcome.FAIL
    found = result.why if "StepError" in result.why else WRONG_RESULTS
    assert re.search(message, found), result.why


@pytest.mark.nightly(cases=3)
@pytest.mark.parametrize("name", RACES)
def test_accesses_without_an_order_are_found(name: str) -> None:
    file, good, bad, case, accesses = RACES[name]
    races = find_races(case, file, good, bad)
    assert any(re.search(accesses, race) for race in races), races
