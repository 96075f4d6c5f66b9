"""Fuses expert routing: from the scores of a router to the chosen experts and their shares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ....graph.dtypes import DType
from ....ops.declaration.attributes import float_attribute as attribute
from ...chains import routed
from ...flow import Flow, apart
from ...operands import need
from ..binding.chains import Fused
from ..binding.launches import Launches, Word, rows_of
from ..device.driver import Source

COUNTS = (1, 2, 4, 8, 16, 32)
"""Possible numbers of scores of a warp lane."""
LANES = 32
SOURCE = Source("routing.cu", tuple(f"route<{n}>" for n in COUNTS), ("items.cuh",))
SOURCES = (SOURCE,)
GATINGS = {"softmax": 0, "sigmoid": 1}


def _route(launches: Launches, flow: Flow, number: int) -> Sequence[int]:
    """Fuse probabilities, the choice of experts, and their shares."""
    chain = routed(flow, number)
    gate, choice, last = flow.call(number), flow.call(chain.choice), flow.call(chain.numbers[-1])
    scores, ids, shares = gate.operand(0), choice.out, last.out
    experts, used = scores.shape[-1], ids.shape[-1]
    scale = 1.0
    if gate.op == "softmax":
        need(gate.optional(1) is None and gate.optional(2) is None, "a mask or sinks change the probabilities")
        scale = float(attribute(gate.attrs, "scale"))
    need(experts <= LANES * COUNTS[-1] and used <= LANES, "experts, or those used, are too many for a warp")
    need(choice.operand(0).shape[-1] == experts, "the choice is among others")
    need(ids.dtype is DType.I32 and ids.is_dense and shares.is_float and shares.is_dense, "results are not dense")
    need(shares.tensor.spec.size == ids.tensor.spec.size, "shares are of others")
    bias = None
    if chain.biased is not None:
        bias = flow.call(chain.biased).operand(1)
        need(bias.is_float and bias.is_dense and bias.tensor.spec.size == experts, "the bias is not one of each expert")
    limits = [0.0, 0.0]
    if chain.limited is not None:
        limits = [float(attribute(flow.call(chain.limited).attrs, name)) for name in ("min", "max")]
    change = [1.0, 0.0]
    if chain.scaled is not None:
        change = [float(attribute(flow.call(chain.scaled).attrs, name)) for name in ("scale", "bias")]
    apart(ids, [scores, bias, shares])
    apart(shares, [scores, bias])
    words: list[Word] = [scores, rows_of(scores), experts, used, GATINGS[gate.op], chain.normal is not None]
    words += [scale, *limits, *change, bias or 0, ids, shares]
    each = next(n for n in COUNTS if LANES * n >= experts)
    launches.add(SOURCE[f"route<{each}>"], math.prod(scores.shape[:-1]), LANES, words)
    return chain.numbers


FUSED: Mapping[str, Sequence[Fused]] = MappingProxyType(dict.fromkeys(GATINGS, (_route,)))
