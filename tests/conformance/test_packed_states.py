"""The layout of states in the kit: quantised operands that lie in states, and faults in the bytes of a state."""

from __future__ import annotations

import pytest

from hocket.backends import find_device
from hocket.backends.cpu.backend import CpuBackend
from hocket.conformance import Outcome, parse_case, run_case
from hocket.conformance.checks.case_graph import build_case_graph
from hocket.conformance.generate_cases import select_quick_cases
from hocket.graph.dtypes import CACHE_DTYPES, DType
from hocket.ops import REGISTRY


@pytest.mark.parametrize("op", ["set_rows", "attention", "lightning_indexer", "cont", "cast", "concat"])
def test_the_quick_run_has_packed_states_of_every_cache_dtype(op):
    states = {
        case.specs[name].dtype for case in select_quick_cases(REGISTRY[op]) for name in build_case_graph(case).states
    }
    assert {dtype for dtype in CACHE_DTYPES if dtype.is_quantised} <= states
    assert {DType.Q1_0, DType.Q2_0} <= states or op in ("cont", "cast", "concat")


@pytest.mark.parametrize(
    ("text", "byte", "reason"),
    [
        ("set_rows(into=q8_0[5,64], rows=f32[2,64], ids=i32[2], layout=state)", None, ""),
        ("set_rows(into=q4_1[5,64], rows=f32[5,64], ids=i32[5], layout=state)", 7, "elements too far off"),
        (
            "set_rows(into=q8_0[5,64], rows=f32[2,64], ids=i32[2], layout=state)",
            5 * 68,
            "state %into or the 1024 bytes",
        ),
        ("cont(x=q5_0[3,64], layout=state)", 0, "state %x or the 1024 bytes after it were written"),
    ],
)
def test_a_wrong_byte_in_a_packed_state_is_found(text, byte, reason, monkeypatch):
    """A run that changes a byte of a state that it only reads, of a row that it writes, or behind the state."""
    compile_program = CpuBackend.compile

    def compile_with_fault(self, program, buffers, on, comm):
        replay = compile_program(self, program, buffers, on, comm)
        number = next(n for n, spec in enumerate(program.buffers) if spec.kind == "state")

        def run():
            replay()
            if byte is not None:
                buffers[number][byte] ^= 4

        return run

    monkeypatch.setattr(CpuBackend, "compile", compile_with_fault)
    result = run_case(parse_case(text), *find_device("cpu:0"))
    assert result.outcome is (Outcome.FAIL if reason else Outcome.PASS)
    assert reason in result.why
