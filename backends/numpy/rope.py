"""NumPy kernel of rotary position embedding: angles are computed in float64, the rotation in float32."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from ...graph.node import Node
from ...ops.declaration.attributes import float_attribute
from ...ops.matrix.rope import compute_rope_frequencies, make_rotary_pair_slices
from ..host.bindings import Binding, Calls, HostInstruction


def bind_rope(call: HostInstruction) -> Calls:
    x, pos, out = call.operand(0), call.operand(1), call.out
    n_dims = int(call.number_attribute("n_dims"))
    half = n_dims // 2
    factors = call.optional_operand(2)
    inverse, magnitude = compute_rope_frequencies(half, call.attrs)
    angle = call.take_scratch(2 * pos.size * half).view(np.float64).reshape(*pos.shape, half)
    cos, sin = call.take_scratch(*pos.shape, half), call.take_scratch(*pos.shape, half)
    a, b = call.take_scratch(*x.shape[:-1], half), call.take_scratch(*x.shape[:-1], half)
    offset = int(call.number_attribute("offset"))
    low, high = make_rotary_pair_slices(n_dims, str(call.attrs["mode"]), offset)
    cos_of, sin_of = cos[..., None, :], sin[..., None, :]
    divided = inverse if factors is None else call.take_scratch(2 * half).view(np.float64)
    calls: Calls = [
        *([] if factors is None else [partial(np.divide, inverse, factors[:half], out=divided)]),
        partial(np.multiply, pos[..., None], divided, out=angle),
        partial(np.cos, angle, out=cos, casting="same_kind"),
        partial(np.sin, angle, out=sin, casting="same_kind"),
    ]
    if magnitude != 1.0:
        calls += [partial(np.multiply, m, np.float32(magnitude), out=m) for m in (cos, sin)]
    calls += [
        partial(np.multiply, x[..., low], sin_of, out=a),
        partial(np.multiply, x[..., high], cos_of, out=b),
        partial(np.add, a, b, out=b),
        partial(np.multiply, x[..., high], sin_of, out=a),
    ]
    # `out` may be `x`, so it is written only after all reads of `x`.
    if not np.shares_memory(x, out):
        calls += [
            partial(np.copyto, out[..., still], x[..., still])
            for still in (slice(0, offset), slice(offset + n_dims, None))
            if x[..., still].size
        ]
    return [
        *calls,
        partial(np.multiply, x[..., low], cos_of, out=out[..., low]),
        partial(np.subtract, out[..., low], a, out=out[..., low]),
        partial(np.copyto, out[..., high], b),
    ]


def _count_rope_scratch(node: Node) -> int:
    half = int(float_attribute(node.attrs, "n_dims")) // 2
    x, pos = node.inputs[0].spec, node.inputs[1].spec
    return 4 * pos.size * half + 2 * half + 2 * (x.size // max(1, x.shape[-1])) * half


KERNELS: Mapping[str, Binding] = {"rope": Binding(bind_rope, _count_rope_scratch)}
