"""Kernels of ``cpu`` on processors that this machine is not, or is with less."""

import math
import os
import re
import shutil
import subprocess
import sys

import pytest

from hocket.backends.cpu.target_cpu import find_features_of_compile_target
from hocket.conformance.cases.case import Case
from hocket.conformance.generate_cases import select_quick_cases
from hocket.ops import REGISTRY

from ...given import on_arm

TRANSLATED = """
import sys
import llvmlite.binding as llvm
import numba
from hocket.backends.cpu import target_cpu
from hocket.backends.cpu.compilation import compiler
from hocket.graph.dtypes import DType

base, features = sys.argv[1:]
if base.startswith("x86") and features:  # LLVM inlines a function only if the features of both are compatible
    numba.config.CPU_FEATURES = f"{llvm.get_host_cpu_features().flatten()},+{features}"
(like,) = (t for t in target_cpu.PRECOMPILED_TARGETS if t.name == base)
target = target_cpu._make_target("other", like.triple, like.cpu, f"{' '.join(like.features)} {features}")
target_cpu.find_host_or_requested_target = lambda: target
from hocket.backends.cpu.kernels.packed.format_table import FORMATS
from hocket.backends.cpu.kernels.matmul.packed_matmul import make_packed_matmul_kernel

module, machine = compiler._translate_to_llvm(make_packed_matmul_kernel(FORMATS[DType.Q4_K]))
print(machine.emit_assembly(module))
"""
"""The assembly of a product; products of all packed types add up bytes by the same functions."""


def pass_all(*words: str, **surroundings: str) -> None:
    """Run Python with these words, and check that it checks some cases and that all pass."""
    done = subprocess.run([sys.executable, *words], env={**os.environ, **surroundings}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b[1-9]\d* pass$", done.stdout.strip()), done.stdout


def needs_arm() -> None:
    """Skip a test where nothing links or runs code for AArch64."""
    for program, package in ((on_arm.COMPILER, "gcc-aarch64-linux-gnu"), (on_arm.EMULATOR, "qemu-user")):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (Debian has it in {package})")


@pytest.mark.long
@pytest.mark.parametrize(
    ("without", "op"),
    [
        ("avx512,avxvnni,gfni", "mul_mat"),
        ("avx512,avxvnni", "rms_norm|softmax"),
        ("avx512vnni", "mul_mat"),
        ("avx512vbmi", "mul_mat"),
    ],
)
def test_a_lesser_processor_computes_the_same(without: str, op: str):
    """All packed types, and plain vector code, for vectors of 256 bits, without dot products of bytes, without matrices
    of bits, and without lookups in tables of 128 bytes."""
    features = find_features_of_compile_target()
    if not any(features[name] for name in features if name.startswith(tuple(without.split(",")))):
        pytest.skip("this processor has none of the features that are left out")
    pass_all("-m", "hocket", "check", "--backend", "cpu", "--op", op, HOCKET_WITHOUT=without)


@pytest.mark.nightly(cases=2)
@pytest.mark.long
@pytest.mark.parametrize(
    ("like", "features", "instruction"),
    [
        ("x86-64-v3", "avxvnni", "vpdpbusd"),
        ("x86-64-v3", "", "vpmaddubsw"),
        ("aarch64", "i8mm", "usdot"),
        ("aarch64", "dotprod", "sdot"),
    ],
)
def test_products_use_the_best_instruction_that_adds_up_bytes(like: str, features: str, instruction: str):
    text = subprocess.run(
        [sys.executable, "-c", TRANSLATED, like, features], capture_output=True, text=True, check=True
    )
    assert text.stdout.count(f"\t{instruction}\t") >= 16


WEIGHT_TYPES = ("f32", "bf16", "q8_0", "q4_1", "q4_K", "q2_K", "q6_K", "iq4_nl", "mxfp4", "iq3_s", "iq1_s", "tq1_0")
"""One type of weights for each way in which kernels expand blocks."""
FEW_WEIGHT_TYPES = ("f32", "q4_K", "iq3_s")
"""A float, a type with a bias, and one with a code book."""


def choose_products(op: str, types: tuple[str, ...]) -> list[Case]:
    """Up to three cases of the quick run for each type: vectors, few rows and many rows of activations."""
    cases = [case for case in select_quick_cases(REGISTRY[op]) if case.operands[0][1].dtype.text in types]
    chosen = {}
    for case in cases:
        weight, activations = case.operands[0][1], case.operands[1][1]
        rows = math.prod(activations.shape[:-1])
        chosen.setdefault((weight.dtype, rows > 1, rows > 16), case)
    return list(chosen.values())


def choose_some(*names: str) -> list[Case]:
    return [case for name in names for case in select_quick_cases(REGISTRY[name])[::25]]


@pytest.mark.nightly(cases=1)
@pytest.mark.long
@pytest.mark.parametrize(
    ("features", "ops", "types"),
    [
        ("dotprod", ["mul_mat", "rms_norm"], FEW_WEIGHT_TYPES),
        ("", ["mul_mat"], WEIGHT_TYPES),
        ("dotprod", ["mul_mat"], WEIGHT_TYPES),
        ("dotprod i8mm", ["mul_mat", "mul_mat_id"], WEIGHT_TYPES),
        ("dotprod", ["attention", "rope", "rms_norm", "softmax", "silu", "gated_delta_net", "ssm_conv"], ()),
    ],
    ids=["few", "plain", "dotprod", "i8mm", "vectors"],
)
def test_arm_computes_the_same(features: str, ops: list[str], types: tuple[str, ...]):
    """Cases of the kit, by kernels that QEMU runs."""
    needs_arm()
    products = [op for op in ops if op.startswith("mul_mat")]
    cases = [case for op in products for case in choose_products(op, types)]
    cases += choose_some(*(op for op in ops if op not in products))
    words = [word for case in cases for word in ("--case", str(case))]
    pass_all(str(on_arm.__file__), features, "check", "--backend", "cpu", "-j", "1", *words)
