"""Mistakes with named barriers, with registers that warps give to others, and with words of a device are found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hocket.backends.base import Tensor
from hocket.backends.cupy.binding.launch_builder import LaunchBuilder
from hocket.backends.cupy.device import nvrtc
from hocket.backends.cupy.device.cubin_cache import load_or_compile_cubin
from hocket.backends.cupy.device.driver import LaunchError, read_kernel_text
from hocket.backends.cupy.emulation.access_log import AccessLogDriver
from hocket.backends.cupy.emulation.emulated_driver import EmulatedDriver
from hocket.backends.cupy.emulation.race_detector import list_races_between_launches
from hocket.backends.fusion.operands import Operand
from hocket.graph import DType

from ...given.devices.emulation import EditedSource, needs_compiler
from ...given.devices.tools import needs

pytestmark = needs_compiler
HEADERS = ("types.cuh", "cuda.cuh", "prelude.cuh", "roles.cuh")
KERNEL_TEXT = "".join((*map(read_kernel_text, HEADERS), Path(__file__).with_name("roles.cu").read_text("utf-8")))
GROUP, NUMBERS = 128, 512
THREADS = {"exchanged": 2 * GROUP, "passed": GROUP}
BLOCKS = {"exchanged": 1, "passed": 3}
"""The three blocks are a cluster, so that they run at the same time."""

STOPPED = {
    "exchanged<NOT_FULL>": "arrives twice at named barrier 2 in one phase",
    "exchanged<NOT_EMPTY>": "arrives twice at named barrier 1 in one phase",
    "exchanged<OTHER_COUNT>": "threads share named barrier 1 with",
    "exchanged<HALF_WARP>": "250 threads share named barrier 1; need whole warps of a block of 256 threads",
    "exchanged<BARRIER_0>": "uses the named barrier 0; need 1 to 15, as __syncthreads is 0",
    "exchanged<BARRIER_16>": "uses the named barrier 16; need 1 to 15",
    "exchanged<OTHER_BARRIER>": "128 threads wait at named barrier",
    "exchanged<ONE_WARP_SHORT>": "threads wait at named barrier",
    "exchanged<LEFT_OVER>": "ends while 128 of 256 threads are missing at named barrier 2",
    "exchanged<TWICE>": "arrives twice at named barrier 1 in one phase",
    "exchanged<ODD_REGISTERS>": "sets 44 registers; need a multiple of 8 from 24 to 256",
    "exchanged<TAKES_FEWER>": "takes up to 240 registers a thread, but has 248",
    "exchanged<RELEASES_MORE>": "releases down to 256 registers a thread, but has 248",
    "exchanged<NOTHING_RELEASED>": "deadlock: a warp waits for registers, and 0 are free",
    "exchanged<ONE_WARP_KEEPS>": "the warps of a warpgroup have different numbers of registers",
    "passed<NEVER>": "deadlock: a thread waits for a word that no running block increments",
    "passed<TOO_MANY>": "deadlock: a thread waits for a word that no running block increments",
}
RACES = (
    "exchanged<EMPTY_TOO_EARLY>",
    "passed<RELAXED>",
    "passed<TOO_EARLY>",
    "passed<NOT_TOGETHER>",
    "passed<NOT_WAITED>",
)
RIGHT = ("exchanged<NONE>", "passed<NONE>")
SOURCE = EditedSource("roles.cu", (*STOPPED, *RACES, *RIGHT), body=KERNEL_TEXT)


def launch(driver: EmulatedDriver, name: str, runs: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Run a kernel, and return its result and the right one."""
    device, kernel = driver.device(0), name.partition("<")[0]
    x = np.random.default_rng(0).integers(-9, 9, NUMBERS).astype(np.float32)
    memory = [driver.alloc(4 * NUMBERS, device) for _ in range(4)]
    operands = [Operand(driver.address(m), Tensor(i, 0, (NUMBERS,), (1,), DType.F32)) for i, m in enumerate(memory)]
    memory[0].view(np.float32)[:] = x
    launches = LaunchBuilder(upload_array=lambda array: 0)
    blocks = BLOCKS[kernel]
    launches.add_launch(
        SOURCE[name], blocks, THREADS[kernel], [*operands], shared_bytes=4 * GROUP, cluster=(blocks, 1, 1)
    )
    run = driver.record(launches.items, device)
    for _ in range(runs):
        memory[1][:], memory[2][:], memory[3][:] = 0xFF, 0xFF, 0
        run()
    expected = x.reshape(-1, GROUP)[:, ::-1].reshape(-1)
    if kernel == "passed":
        expected = np.concatenate((2 * expected[: 2 * GROUP], np.full(2 * GROUP, np.nan, np.float32)))
    return memory[1].view(np.float32).copy(), expected


@pytest.mark.long
@pytest.mark.parametrize("name", RIGHT)
def test_without_a_mistake_nothing_is_found(name: str) -> None:
    for order in range(6):
        found, expected = launch(EmulatedDriver(order), name)
        assert np.array_equal(found, expected, equal_nan=True)
    driver = AccessLogDriver()
    launch(driver, name, runs=4)
    assert list_races_between_launches(driver.take_log(), driver.memory) == []


@pytest.mark.long(cases=3)
@pytest.mark.parametrize("order", range(4))
@pytest.mark.parametrize("name", STOPPED)
def test_a_mistake_stops_the_launch_in_every_order(name: str, order: int) -> None:
    with pytest.raises(LaunchError) as caught:
        launch(EmulatedDriver(order), name)
    assert STOPPED[name] in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.long
@pytest.mark.parametrize("name", RACES)
def test_accesses_without_an_order_are_found_although_results_may_be_right(name: str) -> None:
    driver = AccessLogDriver()
    launch(driver, name, runs=4)
    races = list_races_between_launches(driver.take_log(), driver.memory)
    assert any("in no order with" in race for race in races)


@pytest.mark.long
def test_a_compiler_for_devices_takes_the_instructions() -> None:
    needs(nvrtc.load_nvrtc)
    instructions = ("bar.sync", "bar.arrive", "setmaxnreg.dec", "setmaxnreg.inc", "red.release.gpu", "ld.acquire.gpu")
    assert all(instruction in KERNEL_TEXT for instruction in instructions)
    source = EditedSource("roles.cu", RIGHT, body=KERNEL_TEXT, architectures=("sm_90a",))
    _, names = load_or_compile_cubin(source, "sm_90a")
    assert set(names) == set(RIGHT)
