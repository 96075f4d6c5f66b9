"""Measures the time between two decode steps in which a device waits for the host, with a device that computes nothing.

The emulated device is stubbed: a launch takes a given time on the clock, and its results are made up. A wait for
results lasts until the launch has ended. So all time without a launch is the time of the host.

    python -m hocket.benchmarks.frontend.host_gap --step-us 1200 --tokens 200
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np

from ...backends.base import Device
from ...backends.cupy.emulation.emulated_driver import EmulatedDriver
from ...frontends.generation.generate import GenerationParams, sample_tokens_of_all_sequences
from ...frontends.generation.grammar import Grammar
from ...frontends.generation.sampling import Sampling
from ...frontends.gguf.tokenization.tokenizer import tokenizer_from_metadata
from ...frontends.inference.session import DeviceGroup, Session
from ...frontends.open_model import open_model

SAMPLINGS = {
    "greedy": Sampling(),
    "temperature, top-k, top-p, min-p": Sampling(temperature=0.8),
    "the same with penalties": Sampling(temperature=0.8, repeat_penalty=1.1, presence_penalty=0.1),
}


TOKEN = 300
"""The token of all results."""
MODEL_LAUNCHES = 20
"""Runs of fewer launches run no model; a launch of them takes a hundredth of the time of a model."""


def make_result(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Fill an array with the results of a step: `TOKEN` everywhere, descending logits, and no fault."""
    if array.dtype == np.float32:
        array[...] = -100.0 * np.arange(array.shape[-1])
    else:
        array.fill(TOKEN if array.dtype == np.int32 else 0)
    return array


class StubbedDevice:
    """A device on which a run of a model takes `step_seconds`; it records the seconds between runs."""

    def __init__(self, step_seconds: float) -> None:
        self.step_seconds, self.end, self.gaps = step_seconds, 0.0, list[float]()

    def launch(self, launch_count: int) -> None:
        now = time.perf_counter()
        self.gaps.append(max(0.0, now - self.end))
        self.end = max(now, self.end) + self.step_seconds * (launch_count / 100 if launch_count < MODEL_LAUNCHES else 1)

    def wait_until(self, end: float) -> None:
        while time.perf_counter() < end:
            pass

    def stub_driver(self) -> AbstractContextManager[object]:
        """Replace the launches and reads of emulated devices inside the context."""
        view = EmulatedDriver.view

        def record(driver: EmulatedDriver, launches: Sequence[Any], *operands: Any) -> Callable[[], None]:
            return partial(self.launch, len(launches))

        def make_reader(
            driver: EmulatedDriver, buffers: Sequence[Any], tensors: Sequence[Any]
        ) -> Callable[[], Callable[[], Sequence[Any]]]:
            views = [view(driver, buffers[t.buffer], t) for t in tensors]

            def start() -> Callable[[], Sequence[Any]]:
                end = self.end

                def wait() -> Sequence[Any]:
                    self.wait_until(end)
                    return [make_result(np.array(each)) for each in views]

                return wait

            return start

        def synchronise(driver: EmulatedDriver, on: Device) -> None:
            self.wait_until(self.end)

        return patch.multiple(EmulatedDriver, record=record, make_reader=make_reader, synchronise=synchronise)


def measure_gaps(device: StubbedDevice, session: Session, params: GenerationParams) -> dict[str, float]:
    """Generate a text; return the microseconds of a token, and of the wait of the device for a run, as medians."""
    session.reset(0)
    device.gaps.clear()
    times = [
        time.perf_counter()
        for _ in sample_tokens_of_all_sequences(session, [[1, 2, 3]], params, known=[[]], needs_logits=False)
    ]
    return {
        "token_us": 1e6 * statistics.median(np.diff(times[5:])),
        "gap_us": 1e6 * statistics.median(device.gaps[8:]),
    }


def main() -> None:
    """Print the times of each way of sampling as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-us", type=float, default=1200.0, help="microseconds of a launch on the device")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repetitions", type=int, default=3)
    args = parser.parse_args()
    device = StubbedDevice(args.step_us * 1e-6)
    with device.stub_driver():
        print(json.dumps(measure_variants(device, args.tokens, args.repetitions), indent=1))


def measure_variants(device: StubbedDevice, token_count: int, repetitions: int) -> dict[str, dict[str, float]]:
    """Measure the times of each way of sampling; return the least of the repetitions, in microseconds."""
    session = Session(open_model(None), on=DeviceGroup(devices=("cuda-emulated:0",)), context=256, batch=64)
    tokenizer = tokenizer_from_metadata(session.model.gguf.metadata)
    variants = {name: GenerationParams(token_count, sampling, seed=1) for name, sampling in SAMPLINGS.items()}
    grammar = Grammar(tokenizer, grammar="root ::= [^a]*")
    variants["a grammar"] = GenerationParams(token_count, SAMPLINGS["greedy"], grammar=grammar)
    found = {}
    for name, params in variants.items():
        measure_gaps(device, session, params)  # plans and kernels
        runs = [measure_gaps(device, session, params) for _ in range(repetitions)]
        found[name] = {key: round(min(run[key] for run in runs), 1) for key in runs[0]}
    return found


if __name__ == "__main__":
    main()
