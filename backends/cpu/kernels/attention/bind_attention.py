"""Binding of attention ops to the decode and prefill kernels.

Kernels read the addresses of query, key, value, mask and result of each head from a table. So batches, grouped heads
and shared masks need no kernels of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from .....graph.dtypes import DType
from .....ops.matrix.attention import BLOCK_KEYS
from .....ops.reduction.norms import alibi_slopes
from ....base import contiguous_strides
from ....fusion.operands import BoundInstruction, Operand, float32_bits
from ... import target_cpu
from ...steps.panel_hooks import list_hook_accesses, make_hook_words
from ...steps.step_table import MIN_SHARED_BYTES, StepTableBuilder, ThreadWork
from ..matmul.packed_matmul import make_memory_for_redundant_results
from ..vector.cache_cells import CELLS_BY_DTYPE
from ..vector.elementwise import add_copy_step
from . import amx_attention, decode_attention, partial_results, prefill_attention
from .amx_matrices import is_exact_in_bf16_tiles
from .softmax_scores import HEAD_OUT

MIN_PREFILL_TOKENS = 16
"""Fewest tokens for which lanes should be tokens (prefill kernel)."""
MAX_HEADS_PER_UNIT = 8
"""Largest number of heads of a group."""
LOG2_E = math.log2(math.e)

Addresses = npt.NDArray[np.int64]


def compute_addresses_of_index_combinations(x: Operand, axes: Sequence[tuple[int, npt.NDArray[np.int64]]]) -> Addresses:
    """Compute the addresses of the elements of `x` at all combinations of the given indices.

    Args:
        x: The operand; its index along all other axes is 0.
        axes: Pairs (axis, indices). Indices wrap around at the size of their axis.
    """
    addresses = np.array(x.address, np.int64)
    for axis, index in axes:
        addresses = addresses[..., None] + x.dtype.count_bytes(x.strides[axis]) * (index % x.shape[axis])
    return addresses


def _copy_if_strided(steps: StepTableBuilder, purpose: str, x: Operand) -> Operand:
    """Return `x`, or a dense copy of it if the elements of its rows are not adjacent in memory.

    The copy is an attention operand, too. `purpose` is the name of its scratch memory.
    """
    if x.shape[-1] == 1 or x.strides[-1] == 1 or not all(x.shape):
        return x
    memory = steps.scratch(f"attention {purpose}", x.tensor.spec.nbytes)
    copy = Operand(
        memory.address, replace(memory.tensor, shape=x.shape, strides=contiguous_strides(x.shape), dtype=x.dtype)
    )
    for leading in product(*map(range, x.shape[:-3])):
        source, target = _view_elements_as_rows(x, leading), _view_elements_as_rows(copy, leading)
        is_copied = add_copy_step(steps, source, target)
        assert is_copied, "rows of one element have a walk"
    return copy


def _view_elements_as_rows(x: Operand, leading: Sequence[int]) -> Operand:
    """Return a view of `x` in which each element is a row, at the fixed indices `leading` of its first axes."""
    for axis, i in enumerate(leading):
        x = x.slice_axis(axis, i, 1)
    return replace(x, tensor=replace(x.tensor, shape=(*x.shape, 1), strides=(*x.strides, 1)))


def _view_blocks_as_rows(pool: Operand) -> Operand | None:
    """View a paged KV cache [blocks, keys, heads, size] as [blocks * keys, heads, size]; None if blocks have gaps."""
    blocks, keys, *row = pool.shape
    if pool.strides[0] != keys * pool.strides[1]:
        return None
    return replace(pool, tensor=replace(pool.tensor, shape=(blocks * keys, *row), strides=pool.strides[1:]))


def _count_keys(call: BoundInstruction) -> int:
    """Return the number of keys of a sequence. With a block table the mask gives it; the last block may have more."""
    mask, table = call.optional_operand(3), call.optional_operand(5)
    if table is None:
        return call.operand(1).shape[-3]
    return table.shape[-1] * BLOCK_KEYS if mask is None else mask.shape[-1]


def _build_head_address_table(
    steps: StepTableBuilder,
    call: BoundInstruction,
    q: Operand,
    k: Operand,
    v: Operand,
    mask: Operand | None,
    table: Operand | None,
) -> Addresses:
    """Build the table with eight numbers for each head of each sequence, which attention kernels read.

    They are the addresses of query, key, value, mask and result, then the ALiBi slope, then the addresses of the
    attention sink and of the block table. `softmax_scores` has their byte offsets.
    """
    *leading, _, heads, _ = q.shape
    keys, count = _count_keys(call), len(leading)
    outer = [(i, np.arange(n)) for i, n in enumerate(leading)]
    every, sinks = np.arange(heads), call.optional_operand(4)
    group = every // (heads // k.shape[-2])
    if mask is None:
        mask_addresses = np.array(steps.constant(np.zeros(keys, np.float32)).address)
    else:
        own = call.attrs["mask_heads"] != "one"
        missing = count - (len(mask.shape) - 2 - own)
        axes = [(i - missing, index) for i, index in outer[missing:]]
        mask_addresses = (
            compute_addresses_of_index_combinations(mask, [*axes, (len(axes), every)])
            if own
            else compute_addresses_of_index_combinations(mask, axes)[..., None]
        )
    slopes = [float32_bits(slope * LOG2_E) for slope in alibi_slopes(heads, _read_float_attribute(call, "max_bias"))]
    none = np.full(1, -np.inf, np.float32)
    key_axes = [*outer, (count + 1, group)] if table is None else [(1, group)]
    columns = (
        compute_addresses_of_index_combinations(q, [*outer, (count + 1, every)]),
        compute_addresses_of_index_combinations(k, key_axes),
        compute_addresses_of_index_combinations(v, key_axes),
        mask_addresses,
        compute_addresses_of_index_combinations(call.out, [*outer, (count + 1, every)]),
        np.array(slopes),
        np.array(steps.constant(none).address)
        if sinks is None
        else compute_addresses_of_index_combinations(sinks, [(0, every)]),
        np.array(0) if table is None else compute_addresses_of_index_combinations(table, outer)[..., None],
    )
    return np.stack(np.broadcast_arrays(*columns), -1).astype(np.int64)


def _read_float_attribute(call: BoundInstruction, name: str) -> float:
    """Return the attribute `name` of an instruction as a float."""
    return float(np.asarray(call.attrs[name]))


def _choose_heads_per_unit(shared: int) -> int:
    """Choose the number of query heads that one work unit computes together; they read the same key head.

    Args:
        shared: The number of query heads for each key head.
    """
    return max(n for n in range(1, MAX_HEADS_PER_UNIT + 1) if shared % n == 0)


def _choose_decode_work_split(
    steps: StepTableBuilder, sequences: int, head_groups: int, k: Operand, v: Operand, keys: int
) -> tuple[int, int]:
    """Choose how threads share the work of decode attention: by groups of heads, by ranges of keys, or by both.

    Groups of heads are processed together if the keys of a token are adjacent: then memory is read front to back, which
    processors prefetch. Threads preferably share the groups rather than the keys, because then partial results need no
    merge.

    Args:
        steps: The steps of the program.
        sequences: The number of sequences.
        head_groups: The number of groups of heads in a sequence.
        k: The keys.
        v: The values.
        keys: The number of keys of a sequence.

    Returns:
        The number of groups of heads that are processed together, and the number of splits of the keys.
    """
    key_bytes = sequences * keys * k.dtype.count_bytes(math.prod(k.shape[-2:]))
    max_splits = max(1, keys // decode_attention.KEYS_PER_CHUNK) if key_bytes >= MIN_SHARED_BYTES else 1
    parts = _find_smallest_balanced_split_count(steps, sequences)
    if all(x.shape[-2] * x.strides[-2] <= x.strides[-3] for x in (k, v)):
        if head_groups % parts == 0:
            return head_groups // parts, 1
        if max_splits >= parts:
            return head_groups, parts
    return 1, min(max_splits, _find_smallest_balanced_split_count(steps, sequences * head_groups))


def _find_smallest_balanced_split_count(steps: StepTableBuilder, units: int) -> int:
    """Return the smallest number of parts of each of `units` work units with which all threads get equal work."""
    return steps.threads // math.gcd(units, steps.threads)


def _is_readable_directly_or_copied(x: Operand | None) -> bool:
    """Return whether attention kernels can read keys or values of this form, in place or from a dense copy."""
    return x is not None and (
        x.is_float or (x.dtype in CELLS_BY_DTYPE and x.is_dense_along(-1) and not x.has_packed_layout)
    )


def can_bind_attention(call: BoundInstruction) -> bool:
    """Return whether the kernels of attention can read the operands and write the result of an attention op."""
    return _list_attention_inputs(call) is not None


def _list_attention_inputs(call: BoundInstruction) -> Sequence[Operand | None] | None:
    """Return q, k, v and the mask as the kernels read them; None if they cannot compute the op."""
    inputs, table, out = call.src[:4], call.optional_operand(5), call.out
    if table is not None:
        pools = [_view_blocks_as_rows(call.operand(i)) for i in (1, 2)]
        if (
            table.dtype is not DType.I32
            or not table.is_dense_along(-1)
            or any(x is None or x.strides[-1] != 1 for x in pools)
        ):
            return None
        inputs = (call.operand(0), *pools, *inputs[3:])
    floats = (call.operand(0), call.optional_operand(3), call.optional_operand(4))
    if not all(x is None or x.is_float for x in floats) or not all(map(_is_readable_directly_or_copied, inputs[1:3])):
        return None
    return inputs if out.is_float and out.strides[-1] == 1 else None


def _bind_prefill_or_decode_attention(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    """Add the steps of an attention op: a prefill kernel from `MIN_PREFILL_TOKENS` tokens on, else a decode kernel.

    Return False if the kernels cannot read the operands.
    """
    sinks, table, out, inputs = (
        call.optional_operand(4),
        call.optional_operand(5),
        call.out,
        _list_attention_inputs(call),
    )
    if inputs is None:
        return False
    q, k, v, mask = (
        x and _copy_if_strided(steps, n, x) for n, x in zip(("q", "k", "v", "mask"), (*inputs, None), strict=False)
    )
    assert q is not None
    assert k is not None
    assert v is not None
    *leading, tokens, heads, size = q.shape
    keys, width, shared = _count_keys(call), v.shape[-1], _choose_heads_per_unit(heads // k.shape[-2])
    units = math.prod(leading) * heads // shared
    cap, scale = _read_float_attribute(call, "softcap"), _read_float_attribute(call, "scale")
    addresses = _build_head_address_table(steps, call, q, k, v, mask, table)
    axis = len(leading) if table is None else 0
    common = {
        "tokens": tokens,
        "units": units,
        "shared": shared,
        "keys": keys,
        "size": size,
        "width": width,
        "q_step": 4 * q.strides[len(leading)],
        "k_step": k.dtype.count_bytes(k.strides[axis]),
        "v_step": v.dtype.count_bytes(v.strides[axis]),
        "mask_step": 4 * mask.strides[-2] if mask else 0,
        "out_step": 4 * out.strides[len(leading)],
        "factor": float32_bits(scale / cap if cap else scale * LOG2_E),
        "cap": float32_bits(cap * LOG2_E),
        "heads": steps.constant(addresses).address,
        "pool": 0 if table is None else k.shape[0] // BLOCK_KEYS,
    }
    hook_words = make_hook_words(steps.hooks)
    hook_reads, hook_writes = list_hook_accesses(steps.hooks, 0, heads * width)
    reads, stops = [x for x in (q, k, v, mask, sinks, table) if x is not None], table is not None
    if tokens >= MIN_PREFILL_TOKENS:
        many = (
            amx_attention
            if target_cpu.find_native_or_emulated_amx() and is_exact_in_bf16_tiles(k.dtype, v.dtype)
            else prefill_attention
        )
        span = prefill_attention.choose_tokens_per_work_unit(many.JOBS_PER_TILE, units, shared, tokens, steps.threads)
        each = many.compute_prefill_scratch_bytes_per_thread(shared * span, size, width)
        scratch = steps.scratch("attention", each * steps.threads)
        kernel = many.make_prefill_attention_kernel(k.dtype, v.dtype)
        common |= {"scratch": scratch.address, "scratch_bytes": each}

        def make_thread_work(tickets: int) -> ThreadWork:
            words = prefill_attention.ARGS(**common, span=span, tickets=tickets, hooks=hook_words)
            return ThreadWork(words, [*reads, *hook_reads], [out, scratch, *hook_writes])

        if steps.is_step_shared_by_threads(reads, [out]):
            steps.add_queued(kernel, make_thread_work, stops=stops)
        else:
            steps.add_per_thread(kernel, [make_thread_work(0)], stops=stops)
        return True
    beside, splits = _choose_decode_work_split(steps, math.prod(leading), heads // shared, k, v, keys)
    chunks = 1 if splits == 1 else -(-keys // decode_attention.KEYS_PER_CHUNK)
    rows = tokens * shared
    each = decode_attention.compute_decode_scratch_bytes(rows * beside, keys, size, width)
    parts = steps.scratch(
        "attention parts", units * rows * chunks * partial_results.compute_row_partial_result_bytes(width)
    )
    scratch = steps.scratch("attention", each * steps.threads)
    common |= {"scratch": scratch.address, "scratch_bytes": each}
    common |= {"partial": parts.address, "chunks": chunks, "beside": beside, "splits": splits}
    words = decode_attention.ARGS(**common, hooks=hook_words if splits == 1 else [0])
    writes = [parts, scratch, out, *hook_writes] if splits == 1 else [parts, scratch]
    steps.add_units(
        decode_attention.make_few_token_attention_kernel(k.dtype, v.dtype),
        words,
        units // beside * splits,
        reads=[*reads, *hook_reads] if splits == 1 else reads,
        writes=writes,
        of_units=[out, *hook_reads, *hook_writes] if splits == math.prod(out.shape[:-2]) == 1 else [],
        stops=stops,
    )
    if splits > 1:
        merged = [parts, *([sinks] if sinks else []), *hook_reads]
        _add_merge_partial_results_step(
            steps, call, {**common, "hooks": hook_words}, addresses, merged, [call.out, scratch, *hook_writes]
        )
    return True


def _add_merge_partial_results_step(
    steps: StepTableBuilder,
    call: BoundInstruction,
    common: Mapping[str, Any],
    heads: Addresses,
    reads: Sequence[Operand],
    writes: Sequence[Operand],
) -> None:
    """Add the step that merges the partial results of attention, if threads have split the keys.

    If only matmuls read the result, each thread merges everything into its own copy.
    """
    own = make_memory_for_redundant_results(steps, call)
    if own is None:
        steps.add(
            decode_attention.merge_partial_results,
            decode_attention.ARGS(**common),
            reads=reads,
            writes=writes,
        )
        return

    def make_thread_work(thread: int, out: Operand) -> ThreadWork:
        moved = heads.copy()
        moved[..., HEAD_OUT // 8] += out.address - call.out.address
        own_scratch = common["scratch"] + thread * common["scratch_bytes"]
        words = {**common, "heads": steps.constant(moved).address, "scratch": own_scratch}
        return ThreadWork(decode_attention.ARGS(**words), reads, [out])

    steps.add_per_thread(
        decode_attention.merge_partial_results, [make_thread_work(thread, out) for thread, out in enumerate(own)]
    )
    steps.register_per_thread_values(own, call.out)


BINDINGS = {"attention": _bind_prefill_or_decode_attention}
