"""Faults planted in products by clusters of blocks.

Other numbers show them, the emulation stops them, or an order of accesses is missing. The messages about impossible
clusters are tested as well.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from unittest.mock import patch

import numpy as np
import pytest

from hocket import ops
from hocket.backends.cupy.backend import DriverBackend
from hocket.backends.cupy.device.driver import KernelLaunch, LaunchError
from hocket.backends.cupy.emulation.access_counters import AccessCountingDriver
from hocket.backends.cupy.emulation.access_log import AccessLogBackend, AccessLogDriver
from hocket.backends.cupy.emulation.emulated_driver import EmulatedDriver
from hocket.backends.cupy.emulation.race_detector import list_races_between_launches
from hocket.backends.cupy.kernels.products import tiled
from hocket.graph import Graph, input, weight
from hocket.graph.dtypes import DType
from hocket.graph.errors import BackendError
from hocket.scheduler import load, plan_for_group

from ...given.devices.disordered import RacyDriver
from ...given.devices.emulation import WRONG_RESULTS, FaultyDriver, finding, needs_compiler
from ...given.devices.products import dense, tiles_of

pytestmark = needs_compiler
FILE = "clusters.cu"
ROWS, COLUMNS, TOKENS = 200, 328, 140
"""Two blocks of a cluster with six stages; four stages have room."""


def by_clusters() -> AbstractContextManager[None]:
    return tiles_of(lambda *_: (tiled.CLUSTER_TILE, 1))


def is_right(backend: DriverBackend) -> bool:
    with by_clusters():
        results, want, size = dense(DType.BF16, ROWS, COLUMNS, TOKENS, backend, is_exact=False)
    same = all(np.array_equal(y, results[0]) for y in results)
    return same and bool((np.abs(results[0] - want) <= 2.0**-8 * size).all())


ARRIVE = "arrive_before(full, tile.z * ENTRY);"
EMPTY = "wait_for_phase(&room.empty[step % OF_X], step / OF_X % 2 ^ 1);"
FULL = "wait_for_phase(&room.full[now % OF_X], now / OF_X % 2);"
OVER = "    sync_cluster();  // nobody arrives here any more\n"
STOPPED = {
    "a block is left out": (FILE, "(1 << blocks) - 1", "1 << (blocks - 1)", "deadlock: .* wait at an mbarrier"),
    "a block that is none gets a copy": (
        FILE,
        "(1 << blocks) - 1",
        "(2 << blocks) - 1",
        "to the blocks 7 of a cluster of 2",
    ),
    "fewer bytes are expected": (FILE, ARRIVE, ARRIVE.replace("tile.z", "(tile.z - 1)"), "copies more bytes than"),
    "more bytes are expected": (FILE, ARRIVE, ARRIVE.replace("tile.z", "(tile.z + 1)"), "for 0 arrivals and 128 bytes"),
    "nobody says that a stage may be written over": (FILE, "now >= 2 && ", "now < 0 && ", "for 2 arrivals and 0 bytes"),
    "a stage that was never full has to be empty": (FILE, "step / OF_X % 2 ^ 1", "step / OF_X % 2", "for 2 arrivals"),
    "a block ends while others arrive at it": (FILE, OVER, "", "of a block that has ended|deadlock"),
    "mbarriers are not shown": (FILE, "        show_mbarriers();\n", "", "whose mbarrier is not ready"),
    "mbarriers may not be there yet": (FILE, "    }\n    sync_cluster();\n\n", "    }\n\n", "mbarrier .*not ready"),
    "an mbarrier is no whole word": (
        FILE,
        "(&room.full[s], 1)",
        "((u64 *)((i32 *)&room.full[s] + 1), 1)",
        "aligned to 8 bytes",
    ),
    "copies are no whole pieces": (
        FILE,
        "mine * ENTRY, full",
        "mine * ENTRY - 8, full",
        "not whole and aligned pieces",
    ),
    "a copy ends outside": (
        FILE,
        "room.x[step % OF_X][from], x",
        "room.x[step % OF_X][from] + (1 << 20), x",
        "shared memory that the launch",
    ),
    "a copy begins outside": (
        FILE,
        "x + (i64)step * WIDE * COLUMNS",
        "x + (i64)(step + 1) * WIDE * COLUMNS",
        "memory that is not its own",
    ),
    "the parity of a full stage is wrong": (
        FILE,
        FULL,
        FULL.replace("% 2);", "% 2 ^ 1);"),
        "arrives where nobody is missing",
    ),
    "a stage is read before it is full": (FILE, FULL, "", "arrives where nobody is missing"),
}


@pytest.mark.nightly(cases=5)
@pytest.mark.long
@pytest.mark.parametrize("name", STOPPED)
def test_a_mistake_in_a_product_is_found(name):
    file, old, new, message = STOPPED[name]
    with pytest.raises(BackendError, match=message):
        is_right(DriverBackend(FaultyDriver(file, old, new)))


MISPLACED = {
    "all blocks bring the entries of the first": ("begin) * TERMS * WIDE + from * COLUMNS)", "begin) * TERMS * WIDE)"),
    "a part lies where the first one does": ("room.x[step % OF_X][from], x", "room.x[step % OF_X], x"),
    "pieces are not swizzled": ("swizzled(entry, piece)", "piece * 8"),
    "a block has the weights of another stage": ("room.weights[stage % OF_W].w[", "room.weights[now % 3].w["),
    "both warpgroups have the same rows": (".w[threadIdx.x / 128 * 64]", ".w[0]"),
    "entries change places": ("threadIdx.x % 4 * 2 + i % 2", "threadIdx.x % 4 + i % 2 * 4"),
}


@pytest.mark.nightly(cases=2)
@pytest.mark.long
@pytest.mark.parametrize("name", MISPLACED)
def test_values_in_the_wrong_place_give_other_numbers(name):
    assert finding(FILE, *MISPLACED[name], is_right) == WRONG_RESULTS


@pytest.mark.long
def test_without_a_mistake_nothing_is_found():
    assert is_right(DriverBackend(EmulatedDriver()))


# -------------------------------------------------------------------------------------------------- orders of accesses


def disorders(*edit: str) -> list[str]:
    """Return the unordered accesses of a cluster of two blocks with six stages; four stages have room."""
    driver = RacyDriver(FILE, *edit) if edit else AccessLogDriver()
    backend = AccessLogBackend(driver)
    node = ops.mul_mat(weight("w", (130, 328), DType.BF16), input("x", (130, 328)), exact=False)
    with by_clusters():
        run = load(
            plan_for_group(Graph({"y": node}), [(backend, backend.device(0))]), {"w": np.ones((130, 328), np.uint16)}
        )
        run.run({"x": np.ones((130, 328), np.float32)})
    return list_races_between_launches(driver.take_log(), driver.memory)


HIDDEN = {
    "nobody waits until a stage may be written over": (EMPTY, ""),
    "a block says to itself alone that a stage may be written over": (
        "(now - 2) % OF_X], threadIdx.x)",
        "(now - 2) % OF_X], cluster_rank())",
    ),
}


@pytest.mark.long
def test_what_blocks_share_is_in_order():
    assert disorders() == []


@pytest.mark.nightly(cases=1)
@pytest.mark.long
@pytest.mark.parametrize("name", HIDDEN)
def test_what_is_not_in_order_is_found(name):
    """Numbers may be right: blocks are never far from each other."""
    assert any("cluster.cuh:" in pair and "wgmma.cuh:" in pair for pair in disorders(*HIDDEN[name]))


# ----------------------------------------------------------------------------------------------- counters and launches


@pytest.mark.long
def test_what_a_cluster_shares_is_asked_for_once():
    asked = {}
    for blocks in (1, 2, 4):
        driver = AccessCountingDriver()
        with (
            by_clusters(),
            patch.object(tiled, "_choose_largest_cluster_with_few_idle", lambda _, blocks=blocks: blocks),
        ):
            dense(DType.BF16, 512, 64, 256, DriverBackend(driver), is_exact=False)
        asked[blocks] = driver.counters["clusters.cu: clustered<bf16_bits, 1>"].block_requested_bytes
    x = 256 * 64 * 2
    assert asked[1] - asked[2] == 2 * x
    assert asked[2] - asked[4] == x


@pytest.mark.parametrize("cluster", [(1, 3, 1), (1, 16, 1)])
def test_a_grid_that_clusters_do_not_divide_is_named(cluster):
    kernel = tiled.CLUSTER_SOURCE_BY_DTYPE[DType.BF16]["clustered<bf16_bits, 1>"]
    launch = KernelLaunch(kernel, (1, 16, 1), (256, 1, 1), 0, (0,) * 17, (), 0, cluster)
    driver = EmulatedDriver()
    with pytest.raises(LaunchError, match=f"a grid of 1 x 16 x 1 blocks into clusters of 1 x {cluster[1]} x 1"):
        driver.record([launch], driver.device(0))()
