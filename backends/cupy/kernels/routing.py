"""Fuses expert routing: from the scores of a router to the chosen experts and their shares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ....graph.dtypes import DType
from ....ops.declaration.attributes import float_attribute as attribute
from ...fusion.dataflow import Dataflow, require_no_alias
from ...fusion.operands import Operand, require_supported
from ...fusion.patterns import match_expert_routing
from ..binding.fused_binding import FusionBinder
from ..binding.launch_builder import LaunchBuilder, LaunchWord, compute_row_stride
from ..device.driver import KernelSource

SCORES_PER_LANE = (1, 2, 4, 8, 16, 32)
"""Possible numbers of router scores that one warp lane holds."""
WARP_LANES = 32
HEADERS = ("items.cuh", "routing.cuh")
SOURCE = KernelSource("routing.cu", tuple(f"route<{n}>" for n in SCORES_PER_LANE), HEADERS)
SOURCES = (SOURCE,)
GATING_CODES = {"softmax": 0, "sigmoid": 1}


@dataclass(frozen=True, slots=True)
class ExpertRoutingLaunch:
    """The operands and numbers of a kernel for the expert routing of an MoE layer.

    - `instruction_numbers`: the instructions; the last one computes the expert weights.
    - `top_k`: the instruction that chooses the experts.
    - `scores`: the scores of the router [tokens, experts].
    - `bias`: a number for each expert, which counts for the choice alone.
    - `ids`, `shares`: the results: the chosen experts and their weights, both [tokens, used].
    - `numbers`: the fields of the C struct `Routing` between its sizes and its addresses.
    """

    instruction_numbers: Sequence[int]
    top_k: int
    scores: Operand
    bias: Operand | None
    ids: Operand
    shares: Operand
    numbers: Sequence[LaunchWord]

    @property
    def tokens(self) -> int:
        return math.prod(self.scores.shape[:-1])

    @property
    def scores_per_lane(self) -> int:
        return next(n for n in SCORES_PER_LANE if WARP_LANES * n >= self.scores.shape[-1])

    def list_words(self, scores: Operand) -> list[LaunchWord]:
        """Return the fields of the C struct `Routing`; the scores [tokens, experts] lie at `scores`."""
        sizes = compute_row_stride(scores), scores.shape[-1], self.ids.shape[-1]
        return [scores, *sizes, *self.numbers, self.bias or 0, self.ids, self.shares]


def match_expert_routing_launch(flow: Dataflow, number: int) -> ExpertRoutingLaunch:
    """Match the expert routing that begins with instruction `number`, which computes probabilities.

    Raises `NoKernelError` if it is another pattern, or if no kernel has its sizes.
    """
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
    require_no_alias(ids, [bias, shares])
    require_no_alias(shares, [bias])
    numbers = GATING_CODES[gate.op], chain.normalisation is not None, scale, *limits, *change
    return ExpertRoutingLaunch(chain.instruction_numbers, chain.top_k, scores, bias, ids, shares, numbers)


def _fuse_expert_routing(launches: LaunchBuilder, flow: Dataflow, number: int) -> Sequence[int]:
    """Fuse the expert routing of an MoE layer: probabilities, choice of experts, and the chosen experts' weights."""
    found = match_expert_routing_launch(flow, number)
    for out in (found.ids, found.shares):
        require_no_alias(out, [found.scores])
    kernel = SOURCE[f"route<{found.scores_per_lane}>"]
    launches.add_launch(kernel, found.tokens, WARP_LANES, found.list_words(found.scores))
    return found.instruction_numbers


FUSED: Mapping[str, Sequence[FusionBinder]] = MappingProxyType(dict.fromkeys(GATING_CODES, (_fuse_expert_routing,)))
