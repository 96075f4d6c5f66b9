"""Faults planted in the CUDA kernels of the delta net: the emulation or the numbers must reveal each of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from hocket.backends.cupy.device.device_limits import (
    LARGEST_LIMITS,
    KernelLimits,
    UnmeasuredKernelCandidate,
    find_kernel_limits,
)
from hocket.backends.cupy.device.driver import LaunchError
from hocket.backends.cupy.emulation.access_log import AccessLogBackend, AccessLogDriver
from hocket.backends.cupy.emulation.emulated_driver import EmulatedDriver
from hocket.backends.cupy.emulation.race_detector import list_races_between_launches
from hocket.backends.cupy.kernels.recurrent import gated_delta_net as binding
from hocket.conformance import Outcome, run_case
from hocket.conformance.cases.case import parse_test_case

from ...given.devices.delta_launches import (
    ORDERS,
    Problem,
    bind,
    compute_worst_errors,
    problem,
    reference,
    run,
    with_slots,
)
from ...given.devices.disordered import RacyDriver
from ...given.devices.emulation import needs_compiler, with_fault

pytestmark = needs_compiler

STEP, CHUNKS, PREPARE, SCAN = (
    f"gated_delta_net{name}" for name in (".cu", "_chunks.cuh", "_prepare.cu", "_scan.cu")
)  # fmt: skip
STATES, CLUSTERS = "states.cu", "gated_delta_net_clusters.cu"

A100 = find_kernel_limits("80")


def steps() -> Problem:
    """19 tokens in three stages; rows that do not fill a block; two sequences."""
    return problem(1, 64, 1, 2, 19, batch=2, values=44, snapshots=2)


def chunks() -> Problem:
    """Four chunks, the last of six tokens; two sequences."""
    return problem(2, 64, 1, 1, 102, batch=2)


def make_grouped_problem() -> Problem:
    """Two value heads of a key head."""
    return problem(2, 64, 1, 2, 102)


def channels() -> Problem:
    return problem(3, 64, 1, 1, 102, channels=True)


def step_by_channel() -> Problem:
    return problem(3, 64, 1, 1, 11, channels=True)


def make_swapped_problem() -> Problem:
    return with_slots(problem(4, 64, 1, 1, 3, batch=2), 2, [0, 1], [1, 0])


def find_symptom(
    make: Callable[[], Problem], file: str = "", good: str = "", bad: str = "", limits: KernelLimits = A100
) -> str:
    """Return the symptom of a planted fault; an empty text if there is none."""
    outs = []
    expected = reference(make())
    for order in ORDERS:
        p = make()
        bound = bind(p, in_place=p.pool == "update", limits=limits)
        items = [with_fault(launch, file, good, bad) for launch in bound.items] if file else bound.items
        try:
            run(items, order)
        except LaunchError as why:
            return str(why)
        whole = max(
            compute_worst_errors(got, right)[0] for got, right in zip((bound.out, bound.new), expected, strict=True)
        )
        if not whole <= 1e-7:
            return f"the error is {whole:.1e}"
        outs.append(bound.out)
    return "" if all(np.array_equal(outs[0], x) for x in outs) else "orders of threads differ"


@pytest.fixture(autouse=True)
def several_warps(monkeypatch):
    """In a block of the scan, as on large problems, and all heads of a key head where it prepares."""
    monkeypatch.setattr(binding, "MIN_SCAN_BLOCKS", 1)
    monkeypatch.setattr(binding, "FULL_DEVICE_BLOCKS", 1)


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("make", [steps, chunks, channels, step_by_channel, make_swapped_problem])
def test_without_a_fault_nothing_is_found(make):
    assert not find_symptom(make)


FAULTS = {
    # token by token
    "no barrier before a stage is read": (
        steps,
        STEP,
        "        __syncthreads();  // the stage",
        "        // the stage",
    ),
    "no wait for what is copied": (steps, STEP, "    cp_async_wait<0>();\n    if (CHANNELS)", "    if (CHANNELS)"),
    "one stage instead of two": (steps, STEP, "at = first / tile & 1;", "at = 0;"),
    "a sum leaves lanes out": (steps, STEP, "for (int m = LANES / 2; m; m /= 2)", "for (int m = LANES / 4; m; m /= 2)"),
    "a sum takes the wrong lane": (
        steps,
        STEP,
        "overlap += __shfl_xor_sync(ALL_LANES, overlap, m);",
        "overlap += __shfl_xor_sync(ALL_LANES, overlap, m ^ 1);",
    ),
    "the last stage is read to its end": (
        steps,
        STEP,
        "const int count = min(tile, tokens - first), at",
        "const int count = tile, at",
    ),
    "rows behind the last are read": (steps, STEP, "if (row + r >= a.value_size)", "if (row + r > a.value_size)"),
    "rows behind the last are written": (
        steps,
        STEP,
        "if (row + r < a.value_size) store_some",
        "if (row + r <= a.value_size) store_some",
    ),
    "an output too many": (steps, STEP, "row + sub < a.value_size) a.out", "row + sub <= a.value_size) a.out"),
    "a snapshot too many": (steps, STEP, "if (back < a.stored) keep(back);", "if (back <= a.stored) keep(back);"),
    "the newest snapshot is missing": (
        steps,
        STEP,
        "if (back < a.stored) keep(back);",
        "if (back < a.stored && back) keep(back);",
    ),
    "a decay of the wrong token": (steps, STEP, "scalars[0] = expf(g)", "scalars[threadIdx.x ? 0 : T::SIZE] = expf(g)"),
    "decays by channel are not exponentiated": (
        step_by_channel,
        STEP,
        "if (c < T::DECAY || c >= T::V) continue;",
        "continue;",
    ),
    # pools
    "a state that another sequence writes is not sheltered": (
        make_swapped_problem,
        STATES,
        "const bool moves = block_max(others, room) > 0",
        "const bool moves = block_max(others, room) > 1",
    ),
    "half of a state is sheltered": (
        make_swapped_problem,
        STATES,
        "i < a.state_size; i += blockDim.x) a.aside",
        "i < a.state_size / 2; i += blockDim.x) a.aside",
    ),
    # fragments
    "a left operand with rows and columns exchanged": (
        chunks,
        CHUNKS,
        "split<EXACT>(x[2], x[3], f.hi[1], f.lo[1]);\n    split<EXACT>(y[0], y[1], f.hi[2], f.lo[2]);",
        "split<EXACT>(x[2], x[3], f.hi[2], f.lo[2]);\n    split<EXACT>(y[0], y[1], f.hi[1], f.lo[1]);",
    ),
    "ldmatrix with the wrong row": (
        chunks,
        CHUNKS,
        "place<UNITS>(row + lane / 16 * 8 + lane % 8, at / 8 + lane / 8 % 2)",
        "place<UNITS>(row + lane / 8 % 2 * 8 + lane % 8, at / 8 + lane / 16)",
    ),
    "ldmatrix without its transpose": (chunks, CHUNKS, "ldmatrix_x4_trans(hi, from);", "ldmatrix_x4(hi, from);"),
    "the lower part is lost": (chunks, CHUNKS, "        mma_bf16(x, f.lo, x_hi);\n", ""),
    "tiles shuffled in two ways": (
        chunks,
        CHUNKS,
        "return place<UNITS>(row + lane % 16,",
        "return place<(UNITS > 4 ? 4 : UNITS)>(row + lane % 16,",
    ),
    # preparation
    "no barrier between blocks of the inverse": (
        chunks,
        PREPARE,
        "            *(float4 *)(s.L + corner + w + r * STEP + c) = sum;\n        }\n        __syncthreads();",
        "            *(float4 *)(s.L + corner + w + r * STEP + c) = sum;\n        }",
    ),
    "the diagonal of P is missing": (chunks, PREPARE, "x = r >= c ? x * expf", "x = r > c ? x * expf"),
    "a token behind the last is prepared": (
        chunks,
        PREPARE,
        "if (u * STEP + from < length) x[u] = *(const float4 *)at;",
        "if (u * STEP + from <= length) x[u] = *(const float4 *)at;",
    ),
    "decays behind the last token": (
        chunks,
        PREPARE,
        "float sum = t < length ? bounded(*a.g.row(n, first + t, h)) : 0.f;",
        "float sum = *a.g.row(n, first + t, h);",
    ),
    "sums of decays leave a lane out": (chunks, PREPARE, "if (lane >= m) sum += other;", "if (lane > m) sum += other;"),
    "a head's record is written over before it is out": (
        make_grouped_problem,
        PREPARE,
        "        if (i > 0) __syncthreads();",
        "        ",
    ),
    "all value heads decay alike": (make_grouped_problem, PREPARE, "gates + i * 2 * C, *beta", "gates, *beta"),
    "X without beta": (chunks, PREPARE, "x[1] * beta[1]", "x[1]"),
    "the record is written before it is complete": (
        chunks,
        PREPARE,
        "    __syncthreads();\n    for (int i = threadIdx.x * 16; i < R::HEADS",
        "    for (int i = threadIdx.x * 16; i < R::HEADS",
    ),
    "a factor too many in a diagonal block": (
        channels,
        PREPARE,
        "if (r > c + j) w[j][i] *=",
        "if (r >= c + j) w[j][i] *=",
    ),
    "a block refers to its second row": (
        channels,
        PREPARE,
        "*row_sums = G + 16 * I * STEP, *column_sums",
        "*row_sums = G + (16 * I + 1) * STEP, *column_sums",
    ),
    # scan
    "no barrier between chunks": (chunks, SCAN, "        __syncthreads();  // the stage", "        // the stage"),
    "no barrier before halves are added": (chunks, SCAN, "        __syncthreads();  // halves", "        // halves"),
    "a warp adds what it has itself": (chunks, SCAN, "other = threadIdx.x ^ 32;", "other = threadIdx.x;"),
    "both warps have the same keys": (chunks, SCAN, "first = half * HALF;", "first = 0;"),
    "half of K S": (chunks, SCAN, "            add(KS[j], sums[j * THREADS_HERE + other]);\n", ""),
    "no wait for a chunk": (chunks, SCAN, "        cp_async_wait<AHEAD - 1>();\n", ""),
    "all chunks in one stage": (
        chunks,
        SCAN,
        "        to += chunk % STAGES == STAGES - 1 ? (1 - STAGES) * STAGE : STAGE;\n",
        "",
    ),
    "outputs behind the last token": (chunks, SCAN, "8 * j + e < left) {", "8 * j + e <= left) {"),
    "values behind the last token": (
        chunks,
        SCAN,
        "            if (r < left)\n                cp_async",
        "            if (r <= left)\n                cp_async",
    ),
    "the last token does not decay the state": (
        chunks,
        SCAN,
        "fall = factors[C - 1 - column];",
        "fall = factors[C - 2 - column];",
    ),
    "deltas with the factor of the row above": (chunks, SCAN, "(factors + C + 8 * j)", "(factors + C - 2 + 8 * j)"),
    "blocks of P beside those of X": (
        chunks,
        SCAN,
        "squares + R::P + below(OWN * half + o, k)",
        "squares + R::P + below(OWN * half + o, 0)",
    ),
}


@pytest.mark.nightly(cases=9)
@pytest.mark.long
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str):
    assert find_symptom(*FAULTS[name])


LONG_FAULTS = {
    "threads beyond the first group write no blocks": (PREPARE, "(int)threadIdx.x / 128) continue;", "0) continue;"),
    "rows of a tile are as far apart as in a short chunk": (
        PREPARE,
        "u / WAYS * WAYS * STEP * UNITS * 16",
        "u / WAYS * WAYS * STEP / 2 * UNITS * 16",
    ),
    "queries of the other warp": (SCAN, "(i ^ OWN * half) * ROWS", "(i ^ half) * ROWS"),
    "the halves of queries are not exchanged": (SCAN, "quad(O[2 * OWN + j])", "quad(O[j])"),
    "a decay of other tokens": (SCAN, "(factors + 16 * OWN * half + 8 * j)", "(factors + 16 * half + 8 * j)"),
    "P ends at the first block": (SCAN, "if (k <= OWN * half + o)", "if (k <= half)"),
    "outputs of other tokens": (
        SCAN,
        "a.out.row(n, 16 * OWN * half + column, h)",
        "a.out.row(n, 16 * half + column, h)",
    ),
    "outputs behind the last token": (SCAN, "- 16 * OWN * half - column;", "- 16 * half - column;"),
}
"""Faults that only chunks of 64 tokens reveal: the file, the text and its replacement."""
LONG_LIMITS = replace(A100, candidates=frozenset((UnmeasuredKernelCandidate.DELTA_LONG_CHUNKS,)))


def long_chunks() -> Problem:
    """Three chunks of 64 tokens, the last of 22; two value heads of a key head."""
    return problem(2, 64, 1, 2, 150)


@pytest.fixture
def _long_from_one_token(monkeypatch):
    monkeypatch.setattr(binding, "MIN_LONG_CHUNKED_TOKENS", 1)


@pytest.mark.nightly(cases=3)
@pytest.mark.long
@pytest.mark.usefixtures("_long_from_one_token")
@pytest.mark.parametrize("name", LONG_FAULTS)
def test_a_fault_of_long_chunks_is_found(name: str):
    assert find_symptom(long_chunks, *LONG_FAULTS[name], limits=LONG_LIMITS)


@pytest.mark.long
@pytest.mark.usefixtures("_long_from_one_token")
def test_without_a_fault_of_long_chunks_nothing_is_found():
    assert not find_symptom(long_chunks, limits=LONG_LIMITS)


LONG_PROMPT = (
    "gated_delta_net(q=f32[130,1,64], k=f32[130,1,64], v=f32[130,2,16], g=f32[130,2,1], beta=f32[130,2], "
    "state=f32[2,16,64])"
)
LONG_BARRIERS = {
    "before a stage is read": (SCAN, "        __syncthreads();  // the stage", "        // the stage"),
    "before halves are added": (SCAN, "        __syncthreads();  // halves", "        // halves"),
    "before the record of the next head": (PREPARE, "if (i > 0) __syncthreads();", "if (false) __syncthreads();"),
}


@pytest.mark.nightly(cases=2)
@pytest.mark.long
@pytest.mark.usefixtures("_long_from_one_token")
@pytest.mark.parametrize("name", [None, *LONG_BARRIERS])
def test_each_barrier_of_long_chunks_is_needed(name: str | None, monkeypatch):
    monkeypatch.setattr(EmulatedDriver, "limits", lambda self, on: LONG_LIMITS)
    driver = RacyDriver(*LONG_BARRIERS[name]) if name else AccessLogDriver()
    backend = AccessLogBackend(driver)
    outcome = run_case(parse_test_case(LONG_PROMPT), backend, backend.device(0)).outcome
    assert name or outcome is Outcome.PASS
    assert bool(list_races_between_launches(driver.take_log(), driver.memory)) == bool(name)


BRING = "copy_to_blocks(stage + cluster_rank() * of_keys, keys, of_keys, over, all);"
IN_CLUSTERS = {
    "a block gets no keys": (BRING, BRING.replace("all)", "all / 2)"), "wait at an mbarrier"),
    "blocks bring the same keys": ("keys(keys + cluster_rank() * of_keys)", "keys(keys)", "the error is"),
    "fewer bytes are expected": ("R::KEYS + R::HEADS);", "R::KEYS);", "copies more bytes than"),
    "chunks are read before they are there": (
        "wait_for_phase(full + chunk % STAGES, chunk / STAGES % 2);",
        "",
        "the error is|nobody is missing",
    ),
    "a stage that was never read has to be free": ("chunk / STAGES % 2 ^ 1);", "chunk / STAGES % 2);", "deadlock"),
    "mbarriers may not be there yet": ("        sync_cluster();\n", "", "mbarrier .*not ready"),
}


def many_chunks() -> Problem:
    """Build a problem of six chunks, with room for four; two sequences."""
    return problem(2, 64, 1, 1, 180, batch=2)


@pytest.mark.nightly(cases=2)
@pytest.mark.long
@pytest.mark.parametrize("name", IN_CLUSTERS)
def test_a_fault_of_clusters_is_found(name: str, monkeypatch):
    monkeypatch.setattr(binding, "MIN_SCAN_BLOCKS", 8)  # four blocks for a head
    good, bad, message = IN_CLUSTERS[name]
    assert re.search(message, find_symptom(many_chunks, CLUSTERS, good, bad, LARGEST_LIMITS))


@pytest.mark.long
def test_without_a_fault_of_clusters_nothing_is_found(monkeypatch):
    monkeypatch.setattr(binding, "MIN_SCAN_BLOCKS", 8)
    assert not find_symptom(many_chunks, limits=LARGEST_LIMITS)


HIDDEN = {
    "nobody waits until a stage is free": ("wait_for_phase(empty + chunk % STAGES, chunk / STAGES % 2 ^ 1);", ""),
    "a block frees a stage for itself alone": (
        "arrive_at(empty + chunk % STAGES, threadIdx.x)",
        "arrive_at(empty + chunk % STAGES, cluster_rank())",
    ),
}
PROMPT = (
    "gated_delta_net(q=f32[180,1,64], k=f32[180,1,64], v=f32[180,1,32], g=f32[180,1,1], beta=f32[180,1], "
    "state=f32[1,32,64])"
)


@pytest.mark.nightly(cases=2)
@pytest.mark.long
@pytest.mark.parametrize("name", [None, *HIDDEN])
def test_what_blocks_of_a_cluster_share_is_in_order(name: str | None, monkeypatch):
    """Numbers are right without: blocks are never far from each other."""
    monkeypatch.setattr(binding, "MIN_SCAN_BLOCKS", 2)
    driver = RacyDriver(CLUSTERS, *HIDDEN[name]) if name else AccessLogDriver()
    backend = AccessLogBackend(driver)
    assert run_case(parse_test_case(PROMPT), backend, backend.device(0)).outcome is Outcome.PASS
    pairs = list_races_between_launches(driver.take_log(), driver.memory)
    assert bool(pairs) == bool(name)
    assert all("cluster.cuh:" in pair or "clusters.cu:" in pair for pair in pairs)
