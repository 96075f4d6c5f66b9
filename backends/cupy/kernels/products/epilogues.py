"""Epilogues of kernels that multiply a few rows of x: the last block computes them from the results of all blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ....fusion.operands import Operand
from ...binding.launch_builder import LaunchBuilder, LaunchWord
from ..routing import HEADERS, WARP_LANES, ExpertRoutingLaunch

PLAIN_EPILOGUE = "plain_epilogue.cuh"
"""The header of kernels that leave their results as they are."""
ROUTING_EPILOGUE_HEADERS = (*HEADERS, "last_block.cuh", "routing_epilogue.cuh")
PLAIN_EPILOGUE_WORDS: Sequence[LaunchWord] = (0,)


@dataclass(frozen=True, slots=True)
class RoutingEpilogue:
    """The expert routing by the result of a product, in the same launch.

    - `text`: the CUDA name `Epilogue` for the kernel.
    - `words`: the fields of its struct ``Words``.
    - `shared_bytes`: the dynamic shared memory of a block.
    """

    text: str
    words: Sequence[LaunchWord]
    shared_bytes: int


def make_routing_epilogue(launches: LaunchBuilder, routing: ExpertRoutingLaunch, scores: Operand) -> RoutingEpilogue:
    """Make the epilogue that chooses experts by scores [tokens, experts] which the same launch computes.

    Each token takes one warp of the last block, which has more warps than a GEMV has tokens.
    """
    counter = launches.upload_constant(np.zeros(1, np.uint32))  # the kernel resets it to zero
    words = [*routing.list_words(scores), routing.tokens, counter]
    shared_bytes = 4 * WARP_LANES * routing.scores_per_lane * routing.tokens
    return RoutingEpilogue(f"using Epilogue = RoutingEpilogue<{routing.scores_per_lane}>;\n", words, shared_bytes)
