"""Recurrences other than the gated delta net, on emulated devices.

States of any size are in registers or in memory. Faults planted in the kernels are found.
"""

from __future__ import annotations

import pytest

from hocket.backends.cupy.backend import DriverBackend
from hocket.backends.cupy.emulation.emulated_driver import EmulatedDriver
from hocket.conformance import Outcome, parse_case, run_case

from ...given.devices.emulation import WRONG_RESULTS, finding, needs_compiler

pytestmark = needs_compiler
SIX = "k=f32[2,{t},3,{d}], v=f32[2,{t},3,{e}], r=f32[2,{t},3,{d}], bonus=f32[3,{d}], decay=f32[2,{t},3,{d}]"
CASES = {
    "rwkv_wkv6": SIX + ", state=f32[2,3,{d},{e}]",
    "gated_linear_attn": "k=f32[2,{t},3,{d}], v=f32[2,{t},3,{e}], q=f32[2,{t},3,{d}], g=f32[2,{t},3,{d}],"
    " state=f32[2,3,{d},{e}], scale=0.5",
    "rwkv_wkv7": "r=f32[2,{t},3,{d}], decay=f32[2,{t},3,{d}], k=f32[2,{t},3,{d}], v=f32[2,{t},3,{e}],"
    " a=f32[2,{t},3,{d}], b=f32[2,{t},3,{d}], state=f32[2,3,{e},{d}]",
    "ssm_scan": "x=f32[2,{t},6,{e}], dt=f32[2,{t},6], a=f32[6,{a}], b=f32[2,{t},3,{d}], c=f32[2,{t},3,{d}],"
    " state=f32[2,6,{e},{d}]",
}
SIZES = [(1, 1), (31, 33), (40, 5), (100, 3), (256, 9), (257, 31), (513, 32), (1025, 1)]
"""Of keys and of values."""
SNAPSHOTS = "x=f32[2,5,6,3], dt=f32[2,5,6], a=f32[6,300], b=f32[2,5,3,300], c=f32[2,5,3,300], state=f32[{s},6,3,300]"


def passes(text, backend=None):
    """Whether a case conforms, in each of the orders in which threads take turns."""
    backends = [backend] if backend else [DriverBackend(EmulatedDriver(order)) for order in range(4)]
    results = [run_case(parse_case(text), b, b.device(0)) for b in backends]
    return all(r.outcome is Outcome.PASS for r in results)


@pytest.mark.nightly(cases=22)
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(("keys", "values"), SIZES)
@pytest.mark.parametrize("op", CASES)
def test_states_may_have_any_size(op, keys, values, tokens):
    for rates in (1, keys) if op == "ssm_scan" else (1,):
        assert passes(f"{op}({CASES[op].format(t=tokens, d=keys, e=values, a=rates)})")


def test_states_in_memory_are_saved_as_they_were_some_tokens_ago():
    assert passes(f"ssm_scan({SNAPSHOTS.format(s=2)}, snapshots=3)")
    assert passes(f"ssm_scan({SNAPSHOTS.format(s=2)}, snapshots=7)")


@pytest.mark.parametrize("layout", ["permuted", "sliced", "inplace"])
@pytest.mark.parametrize("op", ["rwkv_wkv6", "rwkv_wkv7"])
def test_operands_may_lie_anyhow(op, layout):
    assert passes(f"{op}({CASES[op].format(t=2, d=300, e=5)}, layout={layout})")


LONG_SIX, LONG_SEVEN = (f"{op}({CASES[op].format(t=3, d=300, e=33)})" for op in ("rwkv_wkv6", "rwkv_wkv7"))
SHORT_SIX, SNAP = (
    f"rwkv_wkv6({CASES['rwkv_wkv6'].format(t=3, d=40, e=33)})",
    f"ssm_scan({SNAPSHOTS.format(s=2)}, snapshots=3)",
)
PLANTS = {
    "every second element is left out": (
        "i < count; i += step) f(memory",
        "i < count; i += 2 * step) f(memory",
        LONG_SIX,
    ),
    "an element too many": (
        "for (int i = first; i < count; i += step)",
        "for (int i = first; i <= count; i += step)",
        LONG_SEVEN,
    ),
    "elements of a column lie together": ("f(memory[i * apart], i, 0)", "f(memory[i], i, 0)", LONG_SIX),
    "the state is not where the newest is kept": (
        "a.kept.row(n * a.snapshots) * state_size",
        "a.kept.row(n * a.snapshots + a.stored - 1) * state_size",
        SNAP,
    ),
    "sums of warps are read too early": (
        "sums[warp][lane] = y;\n        __syncthreads();",
        "sums[warp][lane] = y;",
        LONG_SIX,
    ),
    "a token is read before it is there": ("float y = 0;\n        __syncthreads();", "float y = 0;", SHORT_SIX),
    "a row is read by half a warp": (
        "read = warp_sum(read);",
        "read += __shfl_xor_sync(ALL_LANES, read, 1);",
        LONG_SEVEN,
    ),
}


@pytest.mark.nightly(cases=3)
@pytest.mark.long
@pytest.mark.parametrize("name", PLANTS)
def test_a_mistake_in_a_recurrence_is_found(name):
    old, new, text = PLANTS[name]
    message = finding("recurrences.cu", old, new, lambda planted: all(passes(text, planted) for _ in range(4)))
    assert message == WRONG_RESULTS


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("text", [LONG_SIX, LONG_SEVEN, SHORT_SIX, SNAP])
def test_without_a_mistake_nothing_is_found(text):
    assert passes(text)
