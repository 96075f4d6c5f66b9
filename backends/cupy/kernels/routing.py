"""Fuses expert routing: from the scores of a router to the chosen experts and their shares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ....graph.dtypes import DType
from ....ops.declaration.attributes import float_attribute as attribute
from ...fusion.dataflow import Dataflow, require_no_alias
from ...fusion.operands import require_supported
from ...fusion.patterns import match_expert_routing
from ..binding.fused_binding import FusionBinder
from ..binding.launch_builder import LaunchBuilder, LaunchWord, compute_row_stride
from ..device.driver import KernelSource

SCORES_PER_LANE = (1, 2, 4, 8, 16, 32)
"""Possible numbers of router scores that one warp lane holds."""
WARP_LANES = 32
SOURCE = KernelSource("routing.cu", tuple(f"route<{n}>" for n in SCORES_PER_LANE), ("items.cuh",))
SOURCES = (SOURCE,)
GATING_CODES = {"softmax": 0, "sigmoid": 1}


def _fuse_expert_routing(launches: LaunchBuilder, flow: Dataflow, number: int) -> Sequence[int]:
    """Compute the routing of a mixture-of-experts layer in one launch: probabilities, chosen experts and weights."""
    chain = match_expert_routing(flow, number)
    gate, choice, last = (
        flow.bound_instruction(number),
        flow.bound_instruction(chain.top_k),
        flow.bound_instruction(chain.instruction_numbers[-1]),
    )
    scores, ids, shares = gate.operand(0), choice.out, last.out
    experts, used = scores.shape[-1], ids.shape[-1]
    scale = 1.0
    if gate.op == "softmax":
        require_supported(
            gate.optional_operand(1) is None and gate.optional_operand(2) is None,
            "a mask or sinks change the probabilities",
        )
        scale = float(attribute(gate.attrs, "scale"))
    require_supported(
        experts <= WARP_LANES * SCORES_PER_LANE[-1] and used <= WARP_LANES,
        "experts, or those used, are too many for a warp",
    )
    require_supported(choice.operand(0).shape[-1] == experts, "the choice is among others")
    require_supported(
        ids.dtype is DType.I32 and ids.is_dense and shares.is_float and shares.is_dense, "results are not dense"
    )
    require_supported(shares.tensor.spec.size == ids.tensor.spec.size, "shares are of others")
    bias = None
    if chain.bias_add is not None:
        bias = flow.bound_instruction(chain.bias_add).operand(1)
        require_supported(
            bias.is_float and bias.is_dense and bias.tensor.spec.size == experts, "the bias is not one of each expert"
        )
    limits = [0.0, 0.0]
    if chain.clamp is not None:
        limits = [float(attribute(flow.bound_instruction(chain.clamp).attrs, name)) for name in ("min", "max")]
    change = [1.0, 0.0]
    if chain.scale is not None:
        change = [float(attribute(flow.bound_instruction(chain.scale).attrs, name)) for name in ("scale", "bias")]
    require_no_alias(ids, [scores, bias, shares])
    require_no_alias(shares, [scores, bias])
    words: list[LaunchWord] = [
        scores,
        compute_row_stride(scores),
        experts,
        used,
        GATING_CODES[gate.op],
        chain.normalisation is not None,
    ]
    words += [scale, *limits, *change, bias or 0, ids, shares]
    each = next(n for n in SCORES_PER_LANE if WARP_LANES * n >= experts)
    launches.add_launch(SOURCE[f"route<{each}>"], math.prod(scores.shape[:-1]), WARP_LANES, words)
    return chain.instruction_numbers


FUSED: Mapping[str, Sequence[FusionBinder]] = MappingProxyType(dict.fromkeys(GATING_CODES, (_fuse_expert_routing,)))
