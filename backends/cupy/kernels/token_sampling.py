"""Kernels that sample a token among candidates, and that mask the tokens that a grammar forbids."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from ....graph.dtypes import DType
from ...fusion.operands import BoundInstruction, require_supported
from ..binding.launch_builder import LaunchBuilder, LaunchWord, OpBinder, count_blocks
from ..device.driver import KernelSource
from .elementwise import ELEMENTWISE_THREADS, MAX_ELEMENTS

MAX_SAMPLED_CANDIDATES, SAMPLING_THREADS = 1024, 256
"""Candidates of a row, four for each thread, and threads of its block."""
CANDIDATE_BYTES = 28
"""Bytes of shared memory of a candidate: its key, probability and logit, and its token twice."""
SOURCE = KernelSource("token_sampling.cu", ("sample_token", "mask_bits"), ("items.cuh",))
SOURCES = (SOURCE,)


def _bind_sample_token(launches: LaunchBuilder, call: BoundInstruction) -> None:
    operands = [call.operand(i) for i in range(4)]
    changes = [call.optional_operand(i) for i in (4, 5)]
    require_supported(
        all(x is None or x.is_dense for x in (*operands, *changes, call.out)), "operands of a choice are not dense"
    )
    count, rows = operands[0].shape[-1], math.prod(operands[0].shape[:-1])
    require_supported(count <= MAX_SAMPLED_CANDIDATES, f"{count} candidates are too many for a block")
    changed = next((x.shape[-1] for x in changes if x is not None), 0)
    words: list[LaunchWord] = [count, changed, *operands, *(x or 0 for x in changes), call.out]
    launches.add_launch(SOURCE["sample_token"], rows, SAMPLING_THREADS, words, CANDIDATE_BYTES * count)


def _bind_mask_bits(launches: LaunchBuilder, call: BoundInstruction) -> None:
    x, bits, out = call.operand(0), call.operand(1), call.out
    require_supported(x.dtype is out.dtype is DType.F32, "masked numbers are of another type than f32")
    require_supported(x.is_dense and bits.is_dense and out.is_dense, "operands of a mask are not dense")
    count = math.prod(out.shape)
    require_supported(count < MAX_ELEMENTS, f"a result of {count} elements is too large for one launch")
    words: list[LaunchWord] = [count, out.shape[-1], bits.shape[-1], x, bits, out]
    launches.add_launch(SOURCE["mask_bits"], count_blocks(count, ELEMENTWISE_THREADS), ELEMENTWISE_THREADS, words)


BINDINGS: Mapping[str, OpBinder] = MappingProxyType({"sample_token": _bind_sample_token, "mask_bits": _bind_mask_bits})
