"""Benchmark whole models: decoding and prompts as a user runs them, and the share of the device in the time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from hocket.backends.cupy.cuda_driver import CudaDriver
from hocket.backends.cupy.device.driver import Driver, KernelLaunch
from hocket.frontends.commands import bench as counting
from hocket.frontends.generation.generate import GenerationParams, GenerationTiming, sample_tokens_of_all_sequences
from hocket.frontends.generation.sampling import Sampling
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.models import Batch
from hocket.frontends.open_model import open_model
from hocket.graph.dtypes import DType
from hocket.scheduler import Executor

from . import random_models
from .compare_predictions import predict_step_row
from .harness import BenchmarkDevice, Case, DeviceMemory, MeasuredTime, RecordingDriver, ResultRow
from .machine import Run

MAX_LISTED_KERNELS = 8
"""The number of slowest kernels that are listed."""
DEEP_CONTEXT_TOKENS = 4096
"""The tokens that are in the context before a deep decode test."""


def make_model_cases(bench: BenchmarkDevice) -> Iterator[Case]:
    sizes = bench.select_size((64, (512,)), (1, (2,)))
    yield Case("hocket's embedded model", partial(_measure_model, bench, lambda: None, sizes))
    for path in bench.models:
        yield Case(path.name, partial(_measure_model, bench, lambda path=path: path, sizes))
    if bench.tiny:
        yield Case(
            "random, tiny", partial(_measure_model, bench, lambda: random_models.write_qwen35_tiny(bench.folder), sizes)
        )
        return
    large = (64, (512, 2048, 8192), DEEP_CONTEXT_TOKENS)
    writers = {"Qwen3.5-4B, random Q4_K": lambda: random_models.write_qwen35_4b(bench.folder)}
    for layers in (random_models.QWEN3_NEXT_LAYERS, random_models.QWEN3_NEXT_ALL_LAYERS):
        writers[f"Qwen3-Next-80B-A3B, {layers} of 48 layers, random Q4_0"] = partial(
            random_models.write_qwen3_next, bench.folder, layers, bench.on.memory
        )
    for title, write in writers.items():
        yield Case(title, partial(_measure_model, bench, write, large))


def _measure_model(
    bench: BenchmarkDevice, find: Callable[[], Path | None], sizes: tuple[Any, ...]
) -> Iterator[ResultRow]:
    """Load a model and measure its decode and prompt tests.

    Args:
        bench: The device.
        find: Returns the path of the model, or None for the embedded one. It may write the file first.
        sizes: New tokens, prompt lengths, and optionally the depth of a second decode test.
    """
    new, prompts, deep = (*sizes, 0)[:3]
    start = time.perf_counter()
    path = find()
    if path is not None and "random" in path.name:
        yield {"step": "written", "s": time.perf_counter() - start, "GB": path.stat().st_size / 1e9}
    start, model = time.perf_counter(), open_model(path)
    context = min(model.context_length, max(*prompts, new + deep) + 8)
    on = DeviceGroup(devices=(str(bench.on),))
    session = Session(model, on=on, context=context, batch=max(prompts))
    nbytes = counting.count_weight_bytes_per_token(model)
    yield {"step": "loaded", "s": time.perf_counter() - start, "GB of weights a token": nbytes / 1e9}
    tokens = counting.create_random_context_tokens(session)
    # before the tests: kernels that run alone, on numbers of other kernels, leave faults in the record of their program
    yield from _measure_text(session, tokens[:4], min(new, context - 4) + 1)
    for depth in (0, deep) if deep else (0,):
        yield from _measure_test(bench, session, counting.BenchmarkTest("tg", new, depth), tokens, nbytes)
    # a token and one draft of it: the costs of a step that checks drafts
    yield from _measure_test(bench, session, counting.BenchmarkTest("pp", 2, min(deep, context - 2)), tokens, nbytes)
    for count in prompts:
        yield from _measure_test(bench, session, counting.BenchmarkTest("pp", min(count, context), 0), tokens, 0)
    if any(node.attrs.get("exact") for node in model.graph(session.make_step(1, 1)).nodes):
        del session  # free its weights before the next session loads weights
        session = Session(model, on=replace(on, fast=True), context=context, batch=max(prompts))
        for count in prompts:
            for row in _measure_test(bench, session, counting.BenchmarkTest("pp", min(count, context), 0), tokens, 0):
                yield {**row, "mode": "fast"}
    if path is not None and "random" in path.name:
        path.unlink()


def _measure_text(session: Session, prompt: list[int], count: int) -> Iterator[ResultRow]:
    """Measure a text of `count` tokens as a user gets it: the host chooses each token from logits, then the device.

    Both texts are the same; ``right`` is false otherwise.
    """
    texts: list[list[int]] = []
    for how, needs_logits in (("host", True), ("device", False)):
        for _ in range(2):  # the first round makes plans
            session.reset(0)
            timing, params = GenerationTiming(), GenerationParams(count, Sampling())
            samples = sample_tokens_of_all_sequences(
                session, [prompt], params, known=[[]], timing=timing, needs_logits=needs_logits
            )
            text = [one.token for one in samples]
        texts.append(text)
        row = MeasuredTime(timing.decode / timing.new_tokens, 0.0).as_row()
        yield {"step": f"text, tokens chosen by the {how}", "tok/s": timing.new_tokens / timing.decode, **row}
    yield {"step": "text, host and device", "right": texts[0] == texts[1]}
    session.reset(0)


def _measure_test(
    bench: BenchmarkDevice, session: Session, test: counting.Test, tokens: list[int], nbytes: int
) -> Iterator[ResultRow]:
    """Measure a test as a user runs it, and then one step repeatedly without the host.

    `nbytes` is the number of weight bytes that a token reads.
    """
    ((backend, _),) = session.group
    many, copy = (1 if test.kind == counting.NEW_KIND else test.tokens), bench.copy_bandwidth if nbytes else 0.0
    new = tokens[test.depth : test.depth + many]
    step = session.make_step(1 << (many - 1).bit_length(), test.depth + many)
    plain, watched = backend.driver, RecordingDriver(backend.driver)
    backend.driver = watched
    with watched.collect_recordings() as recorded:
        executor = session.executor(step)
        launches = [launch for group, _ in recorded for launch in group]
    backend.driver = plain
    counting.measure_test_seconds(session, test, tokens)
    taken = median(counting.measure_test_seconds(session, test, tokens) for _ in range(bench.select_size(3, 1)))
    yield {
        "step": test.name,
        "tok/s": test.tokens / taken,
        **MeasuredTime(taken / (test.tokens / many), 0.0).as_row(nbytes, 0, copy),
    }
    seconds = {}
    for how, driver in _make_drivers(plain).items():
        counting.reset_and_prefill_depth(session, test, tokens)  # each driver starts from the same states
        executor.bind(session.model.inputs(step, Batch([new], [test.depth], None)))
        plain.synchronise(bench.on)  # streams of other drivers do not wait for its stream
        own = bench.with_driver(driver)
        memory = DeviceMemory(own)
        runs = [
            _make_input_restorer(own, memory, session, executor),
            *(driver.record(group, bench.on) for group, _ in recorded),
        ]
        whole = own.measure_time([partial(_run_in_order, runs)])
        row = {**whole.as_row(nbytes, 0, copy), "launches": len(launches), "graphs": len(recorded)}
        if driver is plain:
            row |= predict_step_row(executor.plan.graph, str(bench.machine.describe_device()["gpu"]))
        yield {"step": f"{test.name}, {how}", "tok/s": many / whole.seconds, **row}
        seconds[how] = whole.seconds
    yield from _measure_kernels(bench.with_driver(plain), launches, seconds["the device"])


def _make_drivers(driver: Driver) -> dict[str, Driver]:
    """Return one driver for each way in which launches of a step begin.

    On CUDA there are two ways: launches overlap as usual, or each launch begins after the previous one.
    """
    drivers = {"the device": driver}
    if type(driver) is CudaDriver:
        drivers["the device, launches in turn"] = CudaDriver(begins_early=False)
    return drivers


def _run_in_order(runs: Sequence[Run]) -> None:
    for run in runs:
        run()


def _make_input_restorer(bench: BenchmarkDevice, memory: DeviceMemory, session: Session, executor: Executor) -> Run:
    """Return a function that restores the inputs of a step, because later values of the step reuse their memory.

    The inputs are adjacent, so one copy restores all of them.
    """
    (device_plan,), (buffers,) = executor.plan.device_plans, session.store.buffers(executor.plan).values()
    inputs = device_plan.program.inputs.values()
    ((which,),) = [{t.buffer for t in inputs}]
    low, high = min(t.offset for t in inputs), max(t.offset + t.spec.nbytes for t in inputs)
    at = bench.driver.address(buffers[which]) + low
    saved = memory.make_zeros((high - low,), DType.I8).address
    bench.machine.make_copier(saved, at, high - low)()
    return bench.machine.make_copier(at, saved, high - low)


def _measure_kernels(bench: BenchmarkDevice, launches: Sequence[KernelLaunch], whole: float) -> Iterator[ResultRow]:
    """Measure the slowest kernels of a step: all launches of a kernel in all layers, without the other kernels.

    MoE matmuls of many tokens are excluded: by then their tables hold the rows of other layers.
    """
    kernels: dict[str, list[KernelLaunch]] = {}
    routed = {launch.number for launch in launches if launch.kernel.name == "routes"}
    for launch in launches:
        if launch.number not in routed:
            kernels.setdefault(str(launch.kernel), []).append(launch)
    chosen = list(kernels)[: bench.select_size(None, 2)]
    times = {name: bench.measure_launches([kernels[name]]).seconds for name in chosen}
    for name in sorted(times, key=lambda name: -times[name])[:MAX_LISTED_KERNELS]:
        seconds = times[name]
        yield {"step": f"- {name}", "µs": seconds * 1e6, "launches": len(kernels[name]), "of the step": seconds / whole}
