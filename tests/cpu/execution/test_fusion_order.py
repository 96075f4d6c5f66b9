"""The order of a program does not decide the fusion: every valid order gives the same kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from hocket import ops
from hocket.backends.base import Program, Tensor
from hocket.backends.cpu.backend import CpuBackend
from hocket.frontends.inference.session import DeviceGroup, Session, Step
from hocket.frontends.open_model import open_model
from hocket.graph import DType, Graph, StepError, input, state
from hocket.scheduler import Plan, load, plan_for_group

from ...given.models.goldens import FIXTURES

Bytes = tuple[int, int, int]


def bytes_of(program: Program, t: Tensor) -> Bytes:
    """The buffer, the first byte and that behind the last; of a packed tensor the whole buffer."""
    if t.dtype.is_quantised:
        return t.buffer, 0, program.buffers[t.buffer].nbytes
    reach = sum((n - 1) * s for n, s in zip(t.shape, t.strides, strict=True)) + 1
    return t.buffer, t.offset, t.offset + (reach * t.dtype.storage.itemsize if all(t.shape) else 0)


def overlap(some: list[Bytes], others: list[Bytes]) -> bool:
    return any(a[0] == b[0] and a[1] < b[2] and b[1] < a[2] for a in some for b in others)


def predecessors(program: Program) -> list[set[int]]:
    """Return the instructions that must run before each one, because they share bytes and one of the two writes."""
    reads = [[bytes_of(program, t) for t in i.src if t is not None] for i in program.instructions]
    writes = [[bytes_of(program, t) for t in (*i.dst, i.scratch) if t is not None] for i in program.instructions]
    return [
        {m for m in range(n) if overlap(writes[m], reads[n] + writes[n]) or overlap(reads[m], writes[n])}
        for n in range(len(program.instructions))
    ]


def shuffle_instructions(program: Program, rng: np.random.Generator) -> Program:
    """The same instructions in a random order in which each still follows all that it has to; saves move as well."""
    waiting, order = dict(enumerate(predecessors(program))), list[int]()
    while waiting:
        ready = [n for n, before in waiting.items() if not before & waiting.keys()]
        order.append(int(rng.choice(ready)))
        del waiting[order[-1]]
    place: Mapping[int, int] = {number: at for at, number in enumerate(order)}
    undo = sorted(((place[at], back) for at, back in program.undo), key=lambda entry: entry[0])
    return replace(program, instructions=tuple(program.instructions[n] for n in order), undo=tuple(undo))


class Shuffled(Session):
    """A session with shuffled programs."""

    seed: int | None = None

    def plan(self, step: Step) -> Plan:
        step_plan = super().plan(step)
        if self.seed is None:
            return step_plan
        rng = np.random.default_rng(self.seed)
        lanes = tuple(replace(lane, program=shuffle_instructions(lane.program, rng)) for lane in step_plan.device_plans)
        assert lanes[0].program.instructions != step_plan.device_plans[0].program.instructions
        return replace(step_plan, device_plans=lanes)


def ran(name: str, seed: int | None, threads: int) -> tuple[np.ndarray, list[list[str]]]:
    """The logits of a prompt, and of two tokens one by one; the kernels of either step."""
    session = Shuffled(open_model(FIXTURES / name / "model.gguf"), on=DeviceGroup(threads=threads))
    session.seed = seed
    tokens = np.load(FIXTURES / name / "tokens.npy").tolist()
    logits = [session.evaluate([part])[0] for part in (tokens[:9], tokens[9:10], tokens[10:11])]
    return np.concatenate(logits), [
        sorted(session.executor(step).list_kernel_names()) for step in session.planned_steps
    ]


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen35", "qwen3-q4_k_m", "qwen35moe"])
def test_a_program_in_any_order_has_the_same_fused_kernels_and_computes_the_same_bits(name: str):
    logits, kernels = ran(name, None, 1)
    for seed in range(3):
        others, names = ran(name, seed, 1)
        assert names == kernels
        assert np.array_equal(others, logits)
    assert np.array_equal(ran(name, 3, 2)[0], logits)


def test_a_delta_layer_is_one_row_of_fused_kernels_wherever_its_states_are_saved():
    _, kernels = ran("qwen35", 5, 1)
    decode = kernels[-1]
    layers = decode.count("short_convolution.heads.l2_norm_added")
    assert layers > 0
    assert sum(n.startswith("gated_delta_net.advance") for n in decode) == layers
    assert "NumPy" not in decode


def test_another_order_is_one_in_which_each_instruction_still_finds_what_it_reads():
    session = Shuffled(open_model(FIXTURES / "qwen35" / "model.gguf"))
    program = session.plan(session.make_step(1, 8)).device_plans[0].program
    moved = shuffle_instructions(program, np.random.default_rng(1))
    places = {id(i): n for n, i in enumerate(moved.instructions)}
    far = [abs(places[id(i)] - n) for n, i in enumerate(program.instructions)]
    assert max(far) > 10, "the test would hold of itself"
    assert all(moved.instructions[at].dst[0].dtype is DType.F32 for at, _ in moved.undo)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("bad", range(3))
def test_a_step_that_fails_in_any_order_leaves_all_states_as_they_were(bad: int, seed: int):
    caches = [state(f"cache{i}", (4, 64)) for i in range(3)]
    rows = [ops.neg(input(f"x{i}", (1, 64))) for i in range(3)]
    ids = [input(f"ids{i}", (1,), "i32") for i in range(3)]
    updates = {c: ops.set_rows(c, x, i) for c, x, i in zip(caches, rows, ids, strict=True)}
    backend = CpuBackend(2)
    new_plan = plan_for_group(
        Graph({f"y{i}": ops.neg(new) for i, new in enumerate(updates.values())}, updates),
        [(backend, backend.device(0))],
    )
    rng = np.random.default_rng(seed)
    (lane,) = new_plan.device_plans
    run = load(replace(new_plan, device_plans=(replace(lane, program=shuffle_instructions(lane.program, rng)),)), {})
    inputs = {f"x{i}": rng.standard_normal((1, 64)) for i in range(3)} | {f"ids{i}": [i] for i in range(3)}
    run.run(inputs)
    before = [np.asarray(run.store.state(f"cache{i}")).copy() for i in range(3)]
    with pytest.raises(StepError, match="id 4 names no row"):
        run.run(
            {name: -np.asarray(value) if name[0] == "x" else value for name, value in inputs.items()}
            | {f"ids{bad}": [4]}
        )
    for i, was in enumerate(before):
        assert was.any()
        assert np.array_equal(np.asarray(run.store.state(f"cache{i}")), was)
