"""Attention over caches of quantisation blocks on CUDA, emulated: kernels unpack the blocks, which stay as they are."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

import hocket
from hocket import ops
from hocket.backends.cupy.backend import DriverBackend
from hocket.backends.cupy.emulation.access_log import AccessLogBackend, AccessLogDriver
from hocket.backends.cupy.emulation.emulated_driver import EmulatedBackend
from hocket.backends.cupy.emulation.race_detector import list_races_between_launches
from hocket.graph.dtypes import CACHE_DTYPES
from hocket.graph.errors import BackendError
from hocket.ops.matrix.attention import BLOCK_KEYS, attention
from hocket.scheduler import load, plan_for_group

from ...given.devices.emulation import WRONG_RESULTS, finding, needs_compiler
from ...given.devices.key_blocks import KEY_HEADS, SEQUENCES, AttentionRun, build_in_order_and_by_blocks

pytestmark = needs_compiler
BLOCK_CACHES = [str(dtype) for dtype in CACHE_DTYPES if dtype.is_quantised]
KEYS = 150


def run(built: AttentionRun, backend: DriverBackend) -> tuple[npt.NDArray[np.float32], list[str], dict[str, object]]:
    """Return the result, the kernels, and the states as numbers."""
    graph, inputs, states = built
    loaded = load(plan_for_group(graph, [(backend, backend.device(0))]), {})
    for name, rows in states.items():
        loaded.store.state(name)[...] = rows
    result = loaded.run(inputs)["y"]
    numbers = {name: np.array(loaded.store.state(name), np.float64) for name in states}
    return result, [*loaded._program_runners[0].kernels()], numbers


def has_reference_values(built: AttentionRun, backend: DriverBackend) -> bool:
    """Return whether the result over keys in order equals the definition over the same numbers, in float64."""
    result, _, numbers = run(built, backend)
    k, v = (numbers[name].reshape(SEQUENCES, KEYS, KEY_HEADS, -1) for name in ("k", "v"))
    expected = attention.reference(built[1]["q"].astype(np.float64), k, v, built[1]["mask"], scale=0.25)
    return bool(np.max(np.abs(result - expected)) <= 2e-6 * np.max(np.abs(expected)))


@pytest.mark.parametrize("cache", BLOCK_CACHES)
@pytest.mark.parametrize(("tokens", "sizes"), [(1, (64, 96)), (1, (256, 32)), (5, (64, 32)), (40, (64, 96))])
def test_kernels_read_blocks_as_they_are(cache: str, tokens: int, sizes: tuple[int, int]) -> None:
    """Single tokens and prompts; no kernel converts a cache before."""
    built, _ = build_in_order_and_by_blocks(tokens, KEYS, cache, sizes)
    _, kernels, _ = run(built, EmulatedBackend())
    assert has_reference_values(built, EmulatedBackend())
    assert not any("cast" in kernel for kernel in kernels)
    assert any("Block" in kernel for kernel in kernels)


@pytest.mark.long
@pytest.mark.parametrize("cache", [*BLOCK_CACHES, "f16", "f32"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_a_block_table_gives_the_bits_of_keys_in_order(cache: str, tokens: int) -> None:
    in_order, by_blocks = build_in_order_and_by_blocks(tokens, KEYS, cache, (64, 32))
    want, got = (run(built, EmulatedBackend()) for built in (in_order, by_blocks))
    assert np.array_equal(want[0], got[0])
    assert not any("cast" in kernel for kernel in got[1])


@pytest.mark.long
@pytest.mark.parametrize("tokens", [1, 24])
def test_accesses_are_ordered(tokens: int) -> None:
    """One sequence with several tiles of keys: the detector takes microseconds for each access."""
    _, by_blocks = build_in_order_and_by_blocks(tokens, 300, "q5_1", (64, 32), sequences=1)
    driver = AccessLogDriver()
    _, kernels, _ = run(by_blocks, AccessLogBackend(driver))
    assert any("attend_tiles" in kernel for kernel in kernels) == (tokens > 1)
    assert list_races_between_launches(driver.take_log(), driver.memory) == []


FAULTS = {
    "q4_0": ("cells.cuh", "codes >> i / 16 * 4 & 0x0f0f0f0fu", "codes & 0x0f0f0f0fu"),  # high halves are forgotten
    "q5_0": ("cells.cuh", "[i / 16] >> i % 16 & 15", "[i / 16] & 15"),  # fifth bits of the first four
    "q5_1": ("cells.cuh", "FIFTHS = HAS_LOWEST ? 4 : 2", "FIFTHS = 2"),
    "iq4_nl": ("cells.cuh", "(pairs >> 1 & 0x4444)", "0x4444"),
    "q4_1": ("cells.cuh", "fmaf((float)level, scale, lowest)", "(float)level * scale"),
    "q8_0": ("cells.cuh", "(first >> 5) * Block::BYTES", "(first >> 6) * Block::BYTES"),
}


@pytest.mark.nightly(cases=2)
@pytest.mark.long
@pytest.mark.parametrize("cache", FAULTS)
def test_planted_faults_are_found(cache: str) -> None:
    built, _ = build_in_order_and_by_blocks(1, KEYS, cache, (64, 32))
    assert finding(*FAULTS[cache], lambda backend: has_reference_values(built, backend)) == WRONG_RESULTS


def test_blocks_of_keys_at_an_odd_element_are_refused() -> None:
    """The copy of such a pool would exceed the scratch of the plan."""
    size = 2 * BLOCK_KEYS * 8
    q, table = hocket.input("q", (1, 2, 1, 8)), hocket.input("table", (1, 2), "i32")
    row, number = hocket.input("row", (1, size + 1)), hocket.input("number", (1,), "i32")
    cells = ops.set_rows(hocket.state("k", row.shape, "f16"), row, number)
    pool = ops.reshape(ops.slice_(cells, axis=1, start=1, stop=size + 1), shape=(2, BLOCK_KEYS, 1, 8))
    graph = hocket.Graph({"y": ops.attention(q, pool, pool, table=table, scale=0.25, pool="blocks")})
    inputs = {leaf.node.name: np.zeros(leaf.shape, leaf.dtype.storage) for leaf in (q, table, row, number)}
    with pytest.raises(BackendError, match="blocks of f16 keys begin at an odd element; cast them to f32"):
        run((graph, inputs, {}), EmulatedBackend())
