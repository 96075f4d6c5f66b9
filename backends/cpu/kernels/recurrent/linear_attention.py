"""Scans with a matrix state per head and a decay per channel: RWKV 6 and 7, and gated linear attention."""

from __future__ import annotations

from functools import cache

from ....fusion.operands import BoundInstruction, Operand, float32_bits
from ...compilation.compiler import Kernel, kernel
from ...compilation.kernel_args import declare_args
from ...simd.vectors import LANES, fma, lane_sum, load, mul, splat, splat_from, store, store_scalar, zeros
from ...steps.partition import compute_thread_range
from ...steps.step_table import StepTableBuilder
from .head_addresses import compute_address_and_strides

BLOCK_ROWS = 16
"""Rows of a state [value, key] that process all tokens before the next rows do."""
BY_KEY_ARGS = declare_args(
    "sequences tokens heads keys values k[4] v[4] r[4] fading[4] out[4] bonus state new scale:f32"
)
BY_VALUE_ARGS = declare_args(
    "sequences tokens heads keys values r[4] fading[4] k[4] v[4] read_key[4] write_key[4] out[4] state new"
)
"""Operands of four words: the address, and bytes from sequence to sequence, token to token, head to head.

The other operands are dense.
"""


@cache
def make_key_major_linear_attention_kernel(bonus: bool) -> Kernel:
    """Make the linear attention kernel for a state [key, value]: ``S = fading * S + k v^T``, ``out = scale * S^T r``.

    A `bonus` gives the token itself another weight: ``out = (S + bonus * k v^T)^T r`` with the old S.
    """

    def body(a, thread, threads):
        tokens, heads, keys = BY_KEY_ARGS.tokens(a), BY_KEY_ARGS.heads(a), BY_KEY_ARGS.keys(a)
        values = BY_KEY_ARGS.values(a)
        columns = values // LANES
        lo, hi = compute_thread_range(BY_KEY_ARGS.sequences(a) * heads * columns, thread, threads)
        for unit in range(lo, hi):
            c, h, n = 4 * LANES * (unit % columns), unit // columns % heads, unit // columns // heads
            first = 4 * keys * values * (n * heads + h) + c
            new, extra = BY_KEY_ARGS.new(a) + first, BY_KEY_ARGS.bonus(a) + 4 * keys * h
            for t in range(tokens):
                old = new if t > 0 else BY_KEY_ARGS.state(a) + first
                k = BY_KEY_ARGS.k(a, 0) + n * BY_KEY_ARGS.k(a, 1) + t * BY_KEY_ARGS.k(a, 2) + h * BY_KEY_ARGS.k(a, 3)
                r = BY_KEY_ARGS.r(a, 0) + n * BY_KEY_ARGS.r(a, 1) + t * BY_KEY_ARGS.r(a, 2) + h * BY_KEY_ARGS.r(a, 3)
                w = (
                    BY_KEY_ARGS.fading(a, 0)
                    + n * BY_KEY_ARGS.fading(a, 1)
                    + t * BY_KEY_ARGS.fading(a, 2)
                    + h * BY_KEY_ARGS.fading(a, 3)
                )
                v = load(
                    BY_KEY_ARGS.v(a, 0)
                    + n * BY_KEY_ARGS.v(a, 1)
                    + t * BY_KEY_ARGS.v(a, 2)
                    + h * BY_KEY_ARGS.v(a, 3)
                    + c
                )
                out = (
                    BY_KEY_ARGS.out(a, 0)
                    + n * BY_KEY_ARGS.out(a, 1)
                    + t * BY_KEY_ARGS.out(a, 2)
                    + h * BY_KEY_ARGS.out(a, 3)
                    + c
                )
                y = zeros()
                for d in range(keys):
                    state_vector, write = load(old + 4 * values * d), mul(splat_from(k + 4 * d), v)
                    changed = fma(state_vector, splat_from(w + 4 * d), write)
                    seen = fma(splat_from(extra + 4 * d), write, state_vector) if bonus else changed
                    y = fma(splat_from(r + 4 * d), seen, y)  # y[c] += r[d] * S[d, c]
                    store(new + 4 * values * d, changed)
                store(out, mul(y, splat(BY_KEY_ARGS.scale(a))))
        return 0

    return Kernel(f"linear_attention.by_key.{'bonus' if bonus else 'plain'}", body)


@kernel
def compute_value_major_linear_attention(a, thread, threads):
    """Compute linear attention with a state S [value, key], token by token, as in RWKV 7.

    For each token ``S = S * fading + (S read_key) write_key^T + v k^T``, then ``out = S r``.
    """
    tokens, heads, keys = BY_VALUE_ARGS.tokens(a), BY_VALUE_ARGS.heads(a), BY_VALUE_ARGS.keys(a)
    values = BY_VALUE_ARGS.values(a)
    blocks = (values + BLOCK_ROWS - 1) // BLOCK_ROWS
    lo, hi = compute_thread_range(BY_VALUE_ARGS.sequences(a) * heads * blocks, thread, threads)
    for unit in range(lo, hi):
        top, h, n = unit % blocks * BLOCK_ROWS, unit // blocks % heads, unit // blocks // heads
        first = 4 * keys * values * (n * heads + h)
        new = BY_VALUE_ARGS.new(a) + first
        for t in range(tokens):
            old = new if t > 0 else BY_VALUE_ARGS.state(a) + first
            r = (
                BY_VALUE_ARGS.r(a, 0)
                + n * BY_VALUE_ARGS.r(a, 1)
                + t * BY_VALUE_ARGS.r(a, 2)
                + h * BY_VALUE_ARGS.r(a, 3)
            )
            w = (
                BY_VALUE_ARGS.fading(a, 0)
                + n * BY_VALUE_ARGS.fading(a, 1)
                + t * BY_VALUE_ARGS.fading(a, 2)
                + h * BY_VALUE_ARGS.fading(a, 3)
            )
            k = (
                BY_VALUE_ARGS.k(a, 0)
                + n * BY_VALUE_ARGS.k(a, 1)
                + t * BY_VALUE_ARGS.k(a, 2)
                + h * BY_VALUE_ARGS.k(a, 3)
            )
            v = (
                BY_VALUE_ARGS.v(a, 0)
                + n * BY_VALUE_ARGS.v(a, 1)
                + t * BY_VALUE_ARGS.v(a, 2)
                + h * BY_VALUE_ARGS.v(a, 3)
            )
            read_key = (
                BY_VALUE_ARGS.read_key(a, 0)
                + n * BY_VALUE_ARGS.read_key(a, 1)
                + t * BY_VALUE_ARGS.read_key(a, 2)
                + h * BY_VALUE_ARGS.read_key(a, 3)
            )
            write_key = (
                BY_VALUE_ARGS.write_key(a, 0)
                + n * BY_VALUE_ARGS.write_key(a, 1)
                + t * BY_VALUE_ARGS.write_key(a, 2)
                + h * BY_VALUE_ARGS.write_key(a, 3)
            )
            out = (
                BY_VALUE_ARGS.out(a, 0)
                + n * BY_VALUE_ARGS.out(a, 1)
                + t * BY_VALUE_ARGS.out(a, 2)
                + h * BY_VALUE_ARGS.out(a, 3)
            )
            for row in range(top, min(values, top + BLOCK_ROWS)):
                s, after, read = old + 4 * keys * row, new + 4 * keys * row, zeros()
                for c in range(0, 4 * keys, 4 * LANES):
                    read = fma(load(s + c), load(read_key + c), read)
                read, value, y = splat(lane_sum(read)), splat_from(v + 4 * row), zeros()
                for c in range(0, 4 * keys, 4 * LANES):
                    write = fma(read, load(write_key + c), mul(value, load(k + c)))
                    state_vector = fma(load(s + c), load(w + c), write)
                    y = fma(state_vector, load(r + c), y)
                    store(after + c, state_vector)
                store_scalar(out + 4 * row, lane_sum(y))
    return 0


def _has_linear_attention_kernel(call: BoundInstruction, per_token: list[Operand], state: Operand, lanes: int) -> bool:
    """Return whether linear attention kernels can read all operands; they need at least one token.

    Args:
        call: The instruction.
        per_token: The operands with one row per token; the rows must be dense.
        state: The state, which must be dense.
        lanes: The size of the axis along SIMD lanes, which must be whole vectors.
    """
    new, shape = call.dst[1], per_token[0].shape
    dense = all(o.is_float and o.strides[-1] == 1 for o in per_token) and state.is_dense and new.is_dense
    return dense and state.is_float and len(shape) in (3, 4) and shape[-3] > 0 and lanes > 0 and not lanes % LANES


def _make_scan_size_args(keys: Operand, values: Operand) -> dict[str, int]:
    """Make the size arguments of a scan kernel: numbers of sequences, tokens and heads, sizes of keys and values."""
    sequences = keys.shape[0] if len(keys.shape) == 4 else 1
    tokens, heads, size = keys.shape[-3:]
    return {"sequences": sequences, "tokens": tokens, "heads": heads, "keys": size, "values": values.shape[-1]}


def _bind_key_major_linear_attention(
    steps: StepTableBuilder, call: BoundInstruction, per_token: list[Operand], bonus: Operand | None, scale: int
) -> bool:
    """Add the step of linear attention with a state [key, value]; return False if kernels cannot read the operands.

    Args:
        steps: The steps of the program.
        call: The instruction.
        per_token: The operands with one row per token: keys, values, receptance (query) and decay.
        bonus: Another weight for the key and value of the present token (RWKV 6), or None.
        scale: The bits of the float32 factor of the output.
    """
    k, v, r, fading = per_token
    out, state = call.dst[0], call.operand(len(per_token) + (bonus is not None))
    plain = bonus is None or (bonus.is_float and bonus.is_dense)
    if not (plain and _has_linear_attention_kernel(call, [*per_token, out], state, v.shape[-1])):
        return False
    named = {"k": k, "v": v, "r": r, "fading": fading, "out": out}
    block = BY_KEY_ARGS(
        **_make_scan_size_args(k, v),
        **{name: compute_address_and_strides(o, 3, len(k.shape) == 4) for name, o in named.items()},
        bonus=0 if bonus is None else bonus.address,
        state=state.address,
        new=call.dst[1].address,
        scale=scale,
    )
    reads = [*per_token, state] if bonus is None else [*per_token, state, bonus]
    steps.add(make_key_major_linear_attention_kernel(bonus is not None), block, reads=reads, writes=[out, call.dst[1]])
    return True


def _bind_rwkv_wkv6(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    k, v, r, bonus, fading = (call.operand(i) for i in range(5))
    return _bind_key_major_linear_attention(steps, call, [k, v, r, fading], bonus, float32_bits(1.0))


def _bind_gated_linear_attn(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    return _bind_key_major_linear_attention(
        steps, call, [call.operand(i) for i in range(4)], None, call.float_attribute_bits("scale")
    )


def _bind_rwkv_wkv7(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    r, fading, k, v, read_key, write_key, state = (call.operand(i) for i in range(7))
    out, new = call.dst
    per_token = [r, fading, k, v, read_key, write_key]
    if not _has_linear_attention_kernel(call, [*per_token, out], state, k.shape[-1]):
        return False
    named = {"r": r, "fading": fading, "k": k, "v": v, "read_key": read_key, "write_key": write_key, "out": out}
    strides = {name: compute_address_and_strides(o, 3, len(k.shape) == 4) for name, o in named.items()}
    block = BY_VALUE_ARGS(**_make_scan_size_args(k, v), **strides, state=state.address, new=new.address)
    steps.add(compute_value_major_linear_attention, block, reads=[*per_token, state], writes=[out, new])
    return True


BINDINGS = {"rwkv_wkv6": _bind_rwkv_wkv6, "rwkv_wkv7": _bind_rwkv_wkv7, "gated_linear_attn": _bind_gated_linear_attn}
