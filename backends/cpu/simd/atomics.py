"""Operations of kernel threads: atomic shared words, yielding and sleeping, clocks, and calls of kernels by address."""

from __future__ import annotations

import sys

from llvmlite import ir

from ..target_cpu import find_host_or_requested_target
from .vectors import ADDRESS, NOTHING, _call, _i32, _i64, _pointer, intrinsic


@intrinsic(ADDRESS, ADDRESS, ADDRESS)
def fetch_add(b, a, n):
    return b.atomic_rmw("add", _pointer(b, a, _i64), n, "seq_cst")


load_shared = intrinsic(ADDRESS, ADDRESS)(lambda b, a: b.load_atomic(_pointer(b, a, _i64), "acquire", 8))
store_shared = intrinsic(NOTHING, ADDRESS, ADDRESS)(
    lambda b, a, v: b.store_atomic(v, _pointer(b, a, _i64), "release", 8)
)


@intrinsic(ADDRESS)
def yield_core_to_scheduler(b):
    """Yield the core to another thread (``sched_yield``)."""
    return b.sext(_call(b, "sched_yield", _i32), _i64)


@intrinsic(ADDRESS)
def sleep_50_microseconds(b):
    """Sleep for at least 50 microseconds, so that the operating system regards the core as idle."""
    return b.sext(_call(b, "usleep", _i32, ir.Constant(_i32, 50)), _i64)


@intrinsic(ADDRESS)
def read_monotonic_clock(b):
    """Return the nanoseconds of the system clock ``CLOCK_MONOTONIC``."""
    with b.goto_entry_block():
        time = b.alloca(ir.ArrayType(_i64, 2))
    clock = ir.Constant(_i32, 6 if sys.platform == "darwin" else 1)
    _call(b, "clock_gettime", _i32, clock, time)
    parts = [b.load(b.gep(time, [ir.Constant(_i32, 0), ir.Constant(_i32, i)])) for i in (0, 1)]
    return b.add(b.mul(parts[0], ir.Constant(_i64, 10**9)), parts[1])


@intrinsic(ADDRESS)
def read_constant_rate_counter(b):
    """Return a counter that advances at a constant rate, in an unspecified unit.

    On x86 the counter is the cycle counter, and reading takes a fifth of the time of the clock. Other processors use
    the monotonic clock.
    """
    if find_host_or_requested_target().triple.startswith("x86_64"):
        return b.call(b.module.declare_intrinsic("llvm.readcyclecounter", (), ir.FunctionType(_i64, [])), [])
    return read_monotonic_clock.body(b)


@intrinsic(ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS)
def call_kernel(b, kernel_address, argument_block, thread, thread_count):
    """Call the kernel at `kernel_address` for one thread of `thread_count` threads."""
    kind = ir.FunctionType(_i64, [_i64] * 3)
    return b.call(b.inttoptr(kernel_address, kind.as_pointer()), [argument_block, thread, thread_count])
