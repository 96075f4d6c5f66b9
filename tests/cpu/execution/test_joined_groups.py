"""Norms and matmuls of the same activations that run as one step: the bits of separate steps, and fewer steps."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np
import pytest

import hocket
from hocket import ops
from hocket.backends.base import Program
from hocket.backends.capabilities import ProgramFusion
from hocket.backends.cpu.backend import CpuBackend
from hocket.backends.cpu.execution import binding_cache, program_binding
from hocket.backends.cpu.kernels.vector.elementwise import COPY
from hocket.backends.cpu.kernels.vector.expression_kernels import make_expression_kernel
from hocket.backends.cpu.steps.panel_hooks import PrologueWord
from hocket.backends.cpu.steps.prologues import join_steps
from hocket.backends.cpu.steps.step_table import StepTableBuilder, TableStep, ThreadWork
from hocket.benchmarks.gpu import random_models
from hocket.frontends.models import Step
from hocket.frontends.open_model import open_model
from hocket.graph.dtypes import DType
from hocket.scheduler.verifier.fused_kernels import find_fusion_faults

from ...given.random_rows import load, random_values

RNG = np.random.default_rng(50)
LAYER_COLUMNS = 192


def make_layer(rows: int) -> hocket.Graph:
    """A norm that four matmuls of three types read: with a hook, with too few columns for each thread, and as unit."""
    x = hocket.input("x", (rows, LAYER_COLUMNS))
    h = ops.mul(ops.rms_norm(x, eps=1e-6), hocket.weight("scale", (LAYER_COLUMNS,)))
    decay = ops.softplus(
        ops.add(ops.mul_mat(hocket.weight("decay", (16, LAYER_COLUMNS)), h), hocket.weight("bias", (16,)))
    )
    query = ops.mul_mat(hocket.weight("query", (544, LAYER_COLUMNS), DType.Q4_0), h)
    gate, up = (ops.mul_mat(hocket.weight(name, (576, LAYER_COLUMNS), DType.Q8_0), h) for name in ("gate", "up"))
    down = ops.mul_mat(hocket.weight("down", (LAYER_COLUMNS, 576), DType.Q8_0), ops.swiglu(gate, up))
    return hocket.Graph({"decay": decay, "query": ops.neg(query), "y": ops.add(down, x)})


def leave_out_joined_groups(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(program_binding, "choose_joined_groups", lambda flow, patterns: {})
    patch.setattr(program_binding, "_recent_fusions", deque(maxlen=4))
    patch.setattr(binding_cache, "find_binding_file", lambda *args: None)  # the cache has them


def list_steps(program: Program, threads: int) -> list[TableStep]:
    found = program_binding.find_or_choose_fusions(program)
    (steps,) = program_binding._split_into_compiled_segments(*found, StepTableBuilder(threads))
    return steps


def plan_layer(rows: int, threads: int = 2) -> tuple[Program, ProgramFusion]:
    backend = CpuBackend(threads)
    (device_plan,) = hocket.scheduler.plan_for_group(make_layer(rows), [(backend, backend.device(0))]).device_plans
    return device_plan.program, backend.describe_fusion(device_plan.program)


@pytest.mark.long
@pytest.mark.parametrize("rows", [1, 3])
def test_a_norm_and_its_matmuls_are_one_step_with_the_bits_of_several(rows: int, monkeypatch):
    graph, x = make_layer(rows), RNG.standard_normal((rows, LAYER_COLUMNS))
    values = random_values(graph, RNG)
    joined = [load(graph, values, threads).run({"x": x}) for threads in (1, 2, 3)]
    count = len(list_steps(plan_layer(rows)[0], 2))
    leave_out_joined_groups(monkeypatch)
    alone = load(graph, values, 2).run({"x": x})
    assert np.isfinite(alone["y"]).all()
    for results in joined:
        assert all(np.array_equal(results[name].view(np.uint32), alone[name].view(np.uint32)) for name in alone)
    assert count == len(list_steps(plan_layer(rows)[0], 2)) - 3, "three steps joined the last matmul"


def test_many_rows_are_not_joined():
    assert plan_layer(31)[1].joined
    assert not plan_layer(32)[1].joined


@pytest.mark.long(cases=1)
def test_a_token_of_qwen35_4b_takes_few_steps_and_barriers(tmp_path):
    header = random_models.write_qwen35_header(tmp_path / "model.gguf", random_models.SIZE_4B)
    step = Step(1, 1, 8192, 8192, 1, keys=DType.F16, values=DType.F16)
    backend = CpuBackend(2)
    plan = hocket.scheduler.plan_for_group(
        open_model(str(header), header_only=True).graph(step), [(backend, backend.device(0))]
    )
    steps = list_steps(plan.device_plans[0].program, 2)
    assert len(steps) <= 250
    assert sum(step.has_barrier for step in steps) <= 180


# ------------------------------------------------------------------------------------------------------- step tables


def build_table(*parts: tuple[bool, tuple[int, ...]], stops: int | None = None) -> list[TableStep]:
    """Two threads: each step says whether its kernel can call others, and which threads have work."""
    steps, kernel = StepTableBuilder(2), make_expression_kernel(COPY, (False,))
    for number, (can_call, threads) in enumerate(parts):
        words = [PrologueWord() if can_call else 0, 70 + number]
        work = [ThreadWork(words, [], []) if thread in threads else None for thread in range(2)]
        steps.add_per_thread(kernel, work, stops=number == stops)
    return steps.take_steps()


def test_the_last_kernel_that_can_calls_the_others_with_their_words():
    (step,) = join_steps(build_table((False, (0, 1)), (True, (0,)), (True, (0, 1))))
    assert [words.tolist() for words in step.words] == [
        [2, 72, 2, 0, 2, 0, 70, 0, 2, 0, 71],
        [2, 72, 1, 0, 2, 0, 70],
    ]
    assert [[at for at, _ in called] for called in step.kernel_words] == [[3, 7], [3]]


def test_steps_stay_apart_if_a_thread_would_lose_its_work_or_its_barrier():
    assert len(join_steps(build_table((False, (0, 1)), (True, (0,))))) == 2
    assert len(join_steps(build_table((True, (0, 1)), (False, (0, 1))))) == 2
    for stops in (0, 1):
        assert len(join_steps(build_table((False, (0, 1)), (True, (0, 1)), stops=stops))) == 2
    first, second = build_table((False, (0, 1)), (True, (0, 1)))
    assert len(join_steps([first, replace(second, has_barrier=True)])) == 2
    assert len(join_steps([replace(first, is_presplit=False), second])) == 2
    (joined,) = join_steps([replace(first, has_barrier=True), second])
    assert joined.has_barrier


# ---------------------------------------------------------------------------------------------------------- verifier


def set_joined(fusion: ProgramFusion, *joined: tuple[tuple[int, ...], ...]) -> ProgramFusion:
    return replace(fusion, joined=joined)


PLANTED = {
    "a matmul before its norm": ("operands", lambda f: set_joined(f, f.joined[0][::-1])),
    "one group": ("joined", lambda f: set_joined(f, (f.order[0],))),
    "an empty group": ("joined", lambda f: set_joined(f, (*f.joined[0], ()))),
    "a group is missing": ("joined", lambda f: set_joined(f, f.joined[0][:-1])),
    "twice": ("joined", lambda f: set_joined(f, *f.joined, *f.joined)),
    "not known": ("hooks", lambda f: set_joined(f)),
    "a group in two parts": (
        "hooks",
        lambda f: set_joined(f, (*((n,) for group in f.joined[0] for n in group),)),
    ),
    "a collective": ("joined", lambda f: f),
}
"""Faults of joined groups, with the rule that finds each."""


@pytest.mark.parametrize("fault", PLANTED)
def test_each_planted_fault_of_joined_groups_is_found_by_its_rule(fault: str):
    program, fusion = plan_layer(1)
    assert len(fusion.joined) == 1
    assert [*find_fusion_faults(program, fusion)] == []
    rule, plant = PLANTED[fault]
    if fault == "a collective":
        number = fusion.joined[0][-1][-1]
        calls = [*program.instructions]
        calls[number] = replace(calls[number], op="all_reduce")
        program = replace(program, instructions=tuple(calls))
    found = [*find_fusion_faults(program, plant(fusion))]
    assert found
    assert all(why.startswith(f"{rule}: ") for why in found), found
