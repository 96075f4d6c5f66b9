"""Kernels of rotary embedding (RoPE) and timestep embedding, and fusions of attention heads.

A head may pass through several instructions, which one block per row computes: RMS norm, multiplication by a vector,
RoPE, and the store into a KV cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ....graph.dtypes import DType
from ....ops.declaration.attributes import float_attribute
from ....ops.declaration.shape_rules import integers_attribute
from ....ops.matrix.rope import compute_rope_frequencies, map_pairs_to_positions_and_frequencies
from ...fusion.dataflow import Dataflow, has_same_elements, require_no_alias
from ...fusion.operands import BoundInstruction, Operand, require_supported
from ...fusion.patterns import ROPE_OPS, match_normed_rope, match_saved_state_update
from ..binding.fused_binding import FusionBinder
from ..binding.iteration_axes import MAX_ITERATION_AXES, as_row_starts, build_merged_tiling_iteration_axes
from ..binding.launch_builder import LaunchBuilder, LaunchWord, OpBinder, count_blocks
from ..device.driver import KernelSource
from .elementwise import CELL_DTYPES, CUDA_TYPE_NAMES, ELEMENTWISE_THREADS, MAX_ELEMENTS, as_float
from .moves import launch_broadcast_and_convert
from .rows import choose_row_threads

SOURCE = KernelSource(
    "rotary.cu",
    (
        "rope",
        *(f"{kernel}<{CUDA_TYPE_NAMES[t]}>" for kernel in ("place_head", "place_heads") for t in CELL_DTYPES),
        "timesteps",
    ),
    ("cells.cuh", "heads.cuh"),
)
SOURCES = (SOURCE,)


@dataclass(frozen=True, slots=True)
class RopeOperands:
    """Where RoPE reads positions and frequencies, for the two RoPE ops in one form.

    - `positions`: the positions of each token, `step` elements apart if a token has several.
    - `plane`: for each pair of columns, the index of the position to use.
    - `inverse`: the frequency of each pair of columns.
    - `magnitude`: the factor of the results.
    """

    positions: Operand
    step: int
    plane: npt.NDArray[np.int32]
    inverse: npt.NDArray[np.float64]
    magnitude: float

    @classmethod
    def read_positions_and_frequencies(cls, call: BoundInstruction) -> RopeOperands:
        """Return the positions and frequencies of a `rope` or `rope_multi` instruction."""
        n_dims, positions = int(float_attribute(call.attrs, "n_dims")), call.operand(1)
        if call.op == "rope":
            inverse, magnitude = compute_rope_frequencies(n_dims // 2, call.attrs)
            return cls(positions, 0, np.zeros(n_dims // 2, np.int32), inverse, magnitude)
        mode = str(call.attrs["mode"])
        plane, index = map_pairs_to_positions_and_frequencies(
            n_dims if mode == "vision" else n_dims // 2, integers_attribute(call.attrs, "sections"), mode
        )
        inverse, magnitude = compute_rope_frequencies(n_dims // 2, call.attrs, index)
        tensor = positions.tensor
        strides = tensor.strides[:-2] + tensor.strides[-1:]
        of_tokens = replace(
            positions, tensor=replace(tensor, shape=tensor.shape[:-2] + tensor.shape[-1:], strides=strides)
        )
        return cls(of_tokens, tensor.strides[-2], plane.astype(np.int32), inverse, magnitude)

    def make_rope_fields(
        self, launches: LaunchBuilder, call: BoundInstruction, factors: Operand | None
    ) -> list[LaunchWord]:
        """Return the fields of the C struct `Turns`, which describes how RoPE rotates a row.

        Args:
            launches: Uploads the constants.
            call: The RoPE instruction.
            factors: Divisors of the frequencies, or `None`.
        """
        pairs, neighbours = len(self.inverse), call.attrs["mode"] == "normal"
        words: list[LaunchWord] = [
            pairs,
            int(float_attribute(call.attrs, "offset")),
            2 if neighbours else 1,
            1 if neighbours else pairs,
        ]
        words += [
            self.step,
            self.magnitude,
            launches.upload_constant(self.inverse),
            launches.upload_constant(self.plane),
        ]
        return [*words, *([0, 0] if factors is None else [factors, factors.strides[-1]])]

    @property
    def positions_per_head(self) -> Operand:
        """A view of the positions with a repeated axis for the heads."""
        tensor = self.positions.tensor
        return replace(self.positions, tensor=replace(tensor, shape=(*tensor.shape, 1), strides=(*tensor.strides, 0)))


def _bind_rope(launches: LaunchBuilder, call: BoundInstruction) -> None:
    """Bind RoPE to its launches. First copy the columns that it does not rotate, then rotate pairs of columns."""
    x, out, factors, operands = (
        as_float(launches, call.operand(0)),
        call.out,
        call.optional_operand(2),
        RopeOperands.read_positions_and_frequencies(call),
    )
    require_supported(
        operands.positions.dtype is DType.I32, f"positions of type {operands.positions.dtype} are missing"
    )
    factors = None if factors is None else as_float(launches, factors)
    pairs, offset = len(operands.inverse), int(float_attribute(call.attrs, "offset"))
    _copy_unrotated_columns_unless_in_place(launches, x, out, offset, 2 * pairs)
    if not pairs:
        return
    axes = build_merged_tiling_iteration_axes(
        x.shape[:-1], [as_row_starts(x), as_row_starts(out), operands.positions_per_head]
    )
    count = axes.element_count * pairs
    require_supported(count < MAX_ELEMENTS, f"{count} pairs are too many for one launch")
    words: list[LaunchWord] = [
        count,
        x.strides[-1],
        out.strides[-1],
        *operands.make_rope_fields(launches, call, factors),
    ]
    words += [
        *axes.axes_struct_fields,
        *axes.make_address_and_stride_fields(0, x),
        *axes.make_address_and_stride_fields(1, out),
        *axes.make_address_and_stride_fields(2, call.operand(1)),
    ]
    launches.add_launch(SOURCE["rope"], count_blocks(count, ELEMENTWISE_THREADS), ELEMENTWISE_THREADS, words)


def _copy_unrotated_columns_unless_in_place(
    launches: LaunchBuilder, x: Operand, out: Operand, offset: int, rotated_columns: int
) -> None:
    """Copy the columns that RoPE does not rotate; copy nothing if the result is in place.

    Args:
        launches: Receives the launches.
        x: The operand.
        out: The result.
        offset: The first rotated column.
        rotated_columns: The number of rotated columns.
    """
    axis, columns = len(x.shape) - 1, x.shape[-1]
    if x.address == out.address:
        return
    for start, end in ((0, offset), (offset + rotated_columns, columns)):
        if start < end:
            launch_broadcast_and_convert(
                launches, x.slice_axis(axis, start, end - start), out.slice_axis(axis, start, end - start)
            )


def _bind_timestep_embedding(launches: LaunchBuilder, call: BoundInstruction) -> None:
    x, width, period = (
        as_float(launches, call.operand(0)),
        *(int(float_attribute(call.attrs, n)) for n in ("dim", "max_period")),
    )
    half = width // 2
    inverse = np.exp(-math.log(period) * np.arange(max(1, half)) / max(1, half))
    axes = build_merged_tiling_iteration_axes(x.shape, [x])
    count = axes.element_count * width
    require_supported(count < MAX_ELEMENTS, f"a result of {count} elements is too large for one launch")
    words: list[LaunchWord] = [
        count,
        width,
        half,
        launches.upload_constant(inverse),
        *axes.axes_struct_fields,
        *axes.make_address_and_stride_fields(0, x),
        call.out,
    ]
    launches.add_launch(SOURCE["timesteps"], count_blocks(count, ELEMENTWISE_THREADS), ELEMENTWISE_THREADS, words)


# --------------------------------------------------------------------------------------------------------- chains

NO_ROTATION_FIELDS: Sequence[LaunchWord] = (*[0] * 5, 0.0, *[0] * 4)
MAX_SHARED_COLUMNS = 8192
"""Maximum column count of a row that a block keeps in shared memory."""


@dataclass(frozen=True, slots=True)
class NormRopeStoreInstructions:
    """The instruction indices of a fused pattern on attention heads: norm, RoPE, and store into a KV cache.

    In order, they are RMS norm, multiplication by a weight vector, RoPE, and store into a KV cache. The last one saves
    the old cache row for a rollback. An absent instruction is `None`.
    """

    norm: int | None = None
    factor: int | None = None
    rope: int | None = None
    store: int | None = None
    save: int | None = None

    @property
    def instruction_numbers(self) -> list[int]:
        """The indices of the instructions that are present, in program order."""
        chain = (self.norm, self.factor, self.rope, self.store, self.save)
        return [n for n in chain if n is not None]


def _find_cache_store_and_row_save(flow: Dataflow, number: int) -> tuple[int | None, int | None]:
    """Find the instruction that stores a result in a KV cache, and the instruction that saves the overwritten row.

    Returns:
        Both indices. The second is `None` without a save; both are `None` without a store.
    """
    readers = flow.find_readers(number) or []
    if (
        len(readers) != 1
        or flow.bound_instruction(readers[0]).op != "set_rows"
        or not flow.is_whole_result_operand_of(number, readers[0], 1)
    ):
        return None, None
    return readers[0], _find_cache_row_save(flow, readers[0])


def _find_cache_row_save(flow: Dataflow, store: int) -> int | None:
    """Return the index of the instruction that saves the cache row which `store` overwrites; `None` without one."""
    save = flow.find_state_save(flow.bound_instruction(store).operand(0), store)
    return (
        save
        if save is not None and _is_save_of_overwritten_row(flow.bound_instruction(save), flow.bound_instruction(store))
        else None
    )


def _is_save_of_overwritten_row(save: BoundInstruction, store: BoundInstruction) -> bool:
    """Return whether `save` copies the old cache row that `store` then overwrites.

    The answer is no for stores of several rows, because two of them may be the same row.
    """
    ids, there = store.operand(2), save.optional_operand(1)
    same = there is not None and has_same_elements(there, ids) and has_same_elements(save.operand(0), store.operand(0))
    return save.op == "get_rows" and same and ids.tensor.spec.size == 1


@dataclass(frozen=True, slots=True)
class HeadPatternLaunch:
    """One prepared launch of the kernel that computes norm, RoPE and cache store of attention heads.

    It has one thread block for each row of x. `words` are the fields of the C struct `Head`. The operands are stored
    for the check that they do not overlap.
    """

    dtype: DType
    rows: int
    columns: int
    words: Sequence[LaunchWord]
    read_operands: Sequence[Operand]
    written_operands: Sequence[Operand]


def _split_rows_into_heads(x: Operand, columns: int) -> Operand:
    """Return a view of rows with an axis for heads of `columns` columns; the rows if no such heads fill a row."""
    t = x.tensor
    if not columns or t.shape[-1] % columns:
        return x
    shape = (*t.shape[:-1], t.shape[-1] // columns, columns)
    return replace(x, tensor=replace(t, shape=shape, strides=(*t.strides[:-1], columns * t.strides[-1], t.strides[-1])))


def build_head_pattern_launch(
    launches: LaunchBuilder, flow: Dataflow, chain: NormRopeStoreInstructions, stored_columns: int = 0
) -> HeadPatternLaunch:
    """Prepare a launch that computes norm, RoPE and cache store of heads; raise `NoKernelError` if operands do not fit.

    Args:
        launches: Uploads the constants.
        flow: The dataflow of the program.
        chain: The instructions of the pattern.
        stored_columns: Columns of a head of rows that are stored as they are; 0 for whole rows.
    """
    calls = {
        name: flow.bound_instruction(n)
        for name in NormRopeStoreInstructions.__slots__
        if (n := getattr(chain, name)) is not None
    }
    last = calls.get("store") or calls["rope"]
    x = (
        calls["norm"].operand(0)
        if "norm" in calls
        else calls["rope"].operand(0)
        if "rope" in calls
        else _split_rows_into_heads(last.operand(1), stored_columns)
    )
    out, columns = last.out, x.shape[-1]
    require_supported(x.is_float and out.dtype in CELL_DTYPES and out.is_dense, "heads do not lie densely")
    require_supported(columns <= MAX_SHARED_COLUMNS, "a row is too long for shared memory")
    heads, ids, saved, fault = 1, None, None, list[LaunchWord]([0, 0])
    if chain.store is not None:
        into, ids = last.operand(0), last.operand(2)
        heads = out.shape[-1] // columns
        require_supported(
            has_same_elements(into, out) and len(out.shape) == 2 and out.shape[-1] % columns == 0, "the cache is copied"
        )
        require_supported(ids.is_dense and ids.dtype is DType.I32, "rows of the cache are numbered otherwise")
        require_supported(ids.tensor.spec.size * heads == math.prod(x.shape[:-1]), "heads of a token do not fill a row")
        first, launches.number = launches.number, chain.store
        fault = launches.add_fault_message(f"id {{value}} names no row of its table, which has {out.shape[-2]}")
        launches.number = first
        saved = calls["save"].out if "save" in calls else None
    else:
        require_supported(out.shape == x.shape, "heads are put elsewhere")
    w, eps = None, 0.0
    if "factor" in calls:
        w, eps = calls["factor"].operand(1), float(float_attribute(calls["norm"].attrs, "eps"))
        require_supported(
            w.is_float and w.tensor.spec.size == columns == w.shape[-1], "a row is not multiplied by a vector"
        )
    positions, turns = None, list[LaunchWord](NO_ROTATION_FIELDS)
    if "rope" in calls:
        operands, factors = (
            RopeOperands.read_positions_and_frequencies(calls["rope"]),
            calls["rope"].optional_operand(2),
        )
        require_supported(
            operands.positions.dtype is DType.I32 and len(operands.inverse), "positions are of another type"
        )
        require_supported(factors is None or factors.is_float, "factors are of another type")
        positions, turns = operands.positions_per_head, operands.make_rope_fields(launches, calls["rope"], factors)
    for result in (out, saved):
        if result is not None:
            require_no_alias(
                result, [w, positions, ids, *([x] if chain.store is not None else [])], [x] * (chain.store is None)
            )
    axes = build_merged_tiling_iteration_axes(
        x.shape[:-1], [as_row_starts(x), *([] if positions is None else [positions])]
    )
    words: list[LaunchWord] = [columns, heads, x.strides[-1], 0 if w is None else w.strides[-1], eps, w or 0, *turns]
    words += [
        *axes.axes_struct_fields,
        *axes.make_address_and_stride_fields(0, x),
        *([0] * (1 + MAX_ITERATION_AXES) if positions is None else axes.make_address_and_stride_fields(1, positions)),
    ]
    words += [out, ids or 0, out.shape[-2] if chain.store is not None else 0, saved or 0, *fault]
    read = [o for o in (x, w, positions, ids) if o is not None]
    return HeadPatternLaunch(
        out.dtype, axes.element_count, columns, words, read, [o for o in (out, saved) if o is not None]
    )


def _launch_head_pattern(launches: LaunchBuilder, flow: Dataflow, chain: NormRopeStoreInstructions) -> Sequence[int]:
    """Launch norm, RoPE and cache store of attention heads as one kernel; return the indices of these instructions."""
    head_launch = build_head_pattern_launch(launches, flow, chain)
    kernel = SOURCE[f"place_head<{CUDA_TYPE_NAMES[head_launch.dtype]}>"]
    threads = choose_row_threads(head_launch.columns)
    launches.add_launch(kernel, head_launch.rows, threads, head_launch.words, 4 * head_launch.columns)
    return chain.instruction_numbers


def match_norm_and_rope_pattern(flow: Dataflow, first: int) -> NormRopeStoreInstructions:
    """Match instructions on attention heads: ``rms_norm(x) * w``, RoPE, and an optional store into a KV cache."""
    chain = match_normed_rope(flow, first)
    return NormRopeStoreInstructions(*chain, *_find_cache_store_and_row_save(flow, chain.rope))


def _fuse_norm_rope_and_cache_store(launches: LaunchBuilder, flow: Dataflow, first: int) -> Sequence[int]:
    """Compute RMS norm, multiplication by a weight vector and RoPE of heads in one launch, also a cache store."""
    return _launch_head_pattern(launches, flow, match_norm_and_rope_pattern(flow, first))


def _fuse_rope_and_cache_store(launches: LaunchBuilder, flow: Dataflow, first: int) -> Sequence[int]:
    """Compute RoPE of heads and their store into a KV cache in one launch."""
    store, save = _find_cache_store_and_row_save(flow, first)
    require_supported(store is not None, "it goes into no cache")
    return _launch_head_pattern(launches, flow, NormRopeStoreInstructions(rope=first, store=store, save=save))


def match_optional_norm_rope_and_store(flow: Dataflow, store: int) -> NormRopeStoreInstructions:
    """Match instructions on attention heads, from the last one back: a cache store, optionally RoPE and a norm."""
    require_supported(flow.bound_instruction(store).op == "set_rows", "it is no cache of rows")
    rope, save = flow.require_producer(store, 1), _find_cache_row_save(flow, store)
    if flow.bound_instruction(rope).op not in ROPE_OPS:
        return NormRopeStoreInstructions(store=store, save=save)
    require_supported(_find_cache_store_and_row_save(flow, rope) == (store, save), "the rotated head has other readers")
    factor = flow.require_producer(rope, 0)
    if (
        flow.bound_instruction(factor).op == "mul"
        and flow.bound_instruction(norm := flow.require_producer(factor, 0)).op == "rms_norm"
    ):
        return match_norm_and_rope_pattern(flow, norm)
    return NormRopeStoreInstructions(rope=rope, store=store, save=save)


def _fuse_row_save_and_cache_store(launches: LaunchBuilder, flow: Dataflow, first: int) -> Sequence[int]:
    """Save an old cache row for a rollback, and store the new row over it, in one launch."""
    save = flow.bound_instruction(first)
    _, store = match_saved_state_update(flow, first, "set_rows")
    require_supported(_is_save_of_overwritten_row(save, flow.bound_instruction(store)), "it saves no single row")
    return _launch_head_pattern(launches, flow, NormRopeStoreInstructions(store=store, save=first))


FUSED: Mapping[str, Sequence[FusionBinder]] = {
    "rms_norm": (_fuse_norm_rope_and_cache_store,),
    **dict.fromkeys(ROPE_OPS, (_fuse_rope_and_cache_store,)),
    "get_rows": (_fuse_row_save_and_cache_store,),
}
BINDINGS: Mapping[str, OpBinder] = {
    "rope": _bind_rope,
    "rope_multi": _bind_rope,
    "timestep_embedding": _bind_timestep_embedding,
}
