"""The Numba target of kernels translates to LLVM, and emits no machine code."""

from __future__ import annotations

import llvmlite.binding as llvm
import pytest

from hocket.backends.cpu.compilation import compiler
from hocket.backends.cpu.compilation.compiler import kernel, subroutine
from hocket.backends.cpu.simd.vectors import load_long, store_long


@subroutine
def sum_even_numbers(end):
    total = 0
    for i in range(0, end, 2):
        total += max(i, 0)
    return total


@kernel
def write_sum(a, thread, threads):
    store_long(a, sum_even_numbers(load_long(a)))
    return 0


def test_translation_emits_no_machine_code(monkeypatch: pytest.MonkeyPatch):
    compiler._translate_to_llvm(write_sum)  # Numba compiles its runtime before its first kernel
    compiler._to_numba.cache_clear()

    def refuse(*_: object) -> None:
        raise AssertionError("LLVM emits machine code")

    monkeypatch.setattr(llvm.ExecutionEngine, "finalize_object", refuse)
    monkeypatch.setattr(llvm.ExecutionEngine, "add_module", refuse)
    module, _ = compiler._translate_to_llvm(write_sum)
    assert f"hocket.{write_sum.name}" in {function.name for function in module.functions if not function.is_declaration}
