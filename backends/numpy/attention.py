"""NumPy kernels of attention, head by head so that scratch is one matrix of scores, and of the causal mask."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from ...graph.node import Node
from ...ops.declaration.expression import Expression, trace
from ...ops.matrix.attention import BLOCK_KEYS, gather_blocks
from ...ops.reduction.norms import alibi_slopes, normalise_scores
from ..base import Array
from ..host.bindings import Binding, Calls, HostInstruction
from .expressions import count_scratch_elements, make_float32_expression_calls, plan_scratch
from .matmul import multiply_in_float64


def bind_causal_mask(call: HostInstruction) -> Calls:
    """Return the NumPy calls that write a causal mask: 0 for visible positions, -inf for later or too old positions.

    Distances are float32, which is exact below 2^24. The only temporary is one boolean matrix.
    """
    pos, out = call.operand(0), call.out
    cells, window = int(call.number_attribute("cells")), int(call.number_attribute("window"))
    column = np.arange(cells, dtype=np.int32)
    hidden = call.take_scratch((out.size + 3) // 4).view(np.bool_)[: out.size].reshape(out.shape)
    calls: Calls = [
        partial(np.copyto, out, np.float32(0)),
        partial(np.less, pos[..., None], column, out=hidden),
        partial(np.copyto, out, np.float32(-np.inf), where=hidden),
    ]
    if window:
        calls += [
            partial(np.greater_equal, pos[..., None], column + np.int32(window), out=hidden),
            partial(np.copyto, out, np.float32(-np.inf), where=hidden),
        ]
    return calls


def bind_attention(call: HostInstruction) -> Calls:
    """Return the NumPy calls that compute attention, head by head.

    Sums are computed as in `mul_mat`, so they do not depend on the memory layout of the heads. The blocks of a paged KV
    cache are first gathered for each sequence.
    """
    q, k, v = call.operand(0), call.operand(1), call.operand(2)
    mask, sinks, table, out = call.optional_operand(3), call.optional_operand(4), call.optional_operand(5), call.out
    tokens, heads = q.shape[-3], q.shape[-2]
    shared = heads // k.shape[-2] if k.shape[-2] else 1
    keys = _count_keys(k.shape, None if mask is None else mask.shape, None if table is None else table.shape)
    gathered = [] if table is None else [call.take_scratch(keys, *x.shape[-2:]) for x in (k, v)]
    scores = call.take_scratch(tokens, keys)
    bias = call.take_scratch(tokens, keys) if call.number_attribute("max_bias") else None
    softmax = _trace_softmax(sinks is not None)
    plan = plan_scratch(softmax, [scores.shape, (1,)])
    memory = [call.take_scratch(*shape) for shape in plan.shapes]
    numbers = softmax.compute_number_steps({})
    slopes = alibi_slopes(heads, call.number_attribute("max_bias")).astype(np.float32)
    calls: Calls = []
    if mask is not None and call.attrs["mask_heads"] == "one":
        mask = mask[..., None, :, :]
    for i in np.ndindex(q.shape[:-3]):
        all_keys, all_values = (k[i], v[i]) if table is None else gathered
        if table is not None:
            calls += [partial(_gather_blocks, x, table[i], rows) for x, rows in zip((k, v), gathered, strict=True)]
        for h in range(heads):
            masked = None if mask is None else _select_mask_matrix(mask, (*q.shape[:-3], heads), (*i, h))
            key, value = all_keys[:, h // shared], all_values[:, h // shared]
            calls.append(partial(multiply_in_float64, q[i][:, h], key, scores))
            calls += _bind_score_scaling(scores, call)
            if masked is not None and bias is not None:
                calls += [partial(np.multiply, masked, slopes[h], out=bias), partial(np.add, scores, bias, out=scores)]
            elif masked is not None:
                calls.append(partial(np.add, scores, masked, out=scores))
            operands = [scores, None if sinks is None else sinks[h : h + 1]]
            calls += make_float32_expression_calls(softmax, operands, numbers, scores, plan, memory)
            calls.append(partial(multiply_in_float64, scores, value.T, out[i][:, h]))
    return calls


def _count_keys(k: Sequence[int], mask: Sequence[int] | None, table: Sequence[int] | None) -> int:
    """Count the keys of a sequence from the shapes of k, mask and block table; `table` is None for an unpaged cache."""
    if table is None:
        return k[-3]
    return table[-1] * BLOCK_KEYS if mask is None else mask[-1]


def _gather_blocks(pool: Array, table: Array, out: Array) -> None:
    out[...] = gather_blocks(pool, table, len(out))


def _trace_softmax(has_sinks: bool) -> Expression:
    """Trace the softmax of rows of attention scores as an expression, with or without attention sinks."""
    return trace(normalise_scores, (True, has_sinks), (), ())


def _bind_score_scaling(scores: Array, call: HostInstruction) -> Calls:
    cap = call.number_attribute("softcap")
    first = np.float32(call.number_attribute("scale") / (cap or 1.0))
    calls: Calls = [partial(np.multiply, scores, first, out=scores)]
    if cap:
        calls += [partial(np.tanh, scores, out=scores), partial(np.multiply, scores, np.float32(cap), out=scores)]
    return calls


def _select_mask_matrix(mask: Array, leading: tuple[int, ...], index: tuple[int, ...]) -> Array:
    """Select the mask matrix [tokens, keys] of one head of one sequence; axes of size 1 of the mask are broadcast.

    Args:
        mask: The mask; it may lack the first axes of `leading`.
        leading: The shape of all axes before tokens and keys, such as (sequences, heads).
        index: The index in this shape, such as (1, 5) for head 5 of sequence 1.
    """
    mine = mask.shape[:-2]
    tail = index[len(leading) - len(mine) :]
    return mask[tuple(i % n for i, n in zip(tail, mine, strict=True))]


def _count_attention_scratch(node: Node) -> int:
    q, k, v, mask, sinks, table = (None if x is None else x.shape for x in (*node.src, *[None] * (6 - len(node.src))))
    assert q is not None
    assert k is not None
    assert v is not None
    keys = _count_keys(k, mask, table)
    matrices = 2 if node.attrs["max_bias"] else 1
    plan = plan_scratch(_trace_softmax(sinks is not None), [(q[-3], keys), (1,)])
    gathered = 0 if table is None else keys * (math.prod(k[-2:]) + math.prod(v[-2:]))
    return gathered + q[-3] * matrices * keys + count_scratch_elements(plan)


KERNELS: Mapping[str, Binding] = {
    "causal_mask": Binding(bind_causal_mask, lambda node: (node.specs[0].size + 3) // 4),
    "attention": Binding(bind_attention, _count_attention_scratch),
}
