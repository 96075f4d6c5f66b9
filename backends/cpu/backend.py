"""The CPU backend: weights packed in the quantised types of their files, and compiled kernels replayed without the GIL.

Ops without a compiled kernel run in NumPy, on float32 copies of their weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Self

import numpy as np

from ...graph.dtypes import STATE_DTYPES, DType
from ...graph.errors import format_count
from ...graph.node import Node
from ...graph.spec import Spec
from ...ops.collectives import COLLECTIVES
from ...ops.quantisation import decode_array, dequantise, encode_array
from ..base import Array, Comm, Device, Instruction, Program, Tensor, contiguous_strides, view_host_tensor
from ..capabilities import KernelCall, ProgramFusion
from ..numpy.backend import NumpyBackend
from .compilation.compiler import KERNEL_FUNCTION, compute_kernel_code_digest
from .execution.binding_cache import find_binding_file, load_or_bind_cached_replay
from .execution.replay import Replay
from .execution.thread_pool import ThreadPool
from .kernels.packed.format_table import FORMATS, GROUP_ROWS
from .kernels.packed.weight_packing import (
    PACK_ARGS,
    UNPACK_ARGS,
    make_dequantise_rows_by_id_kernel,
    make_pack_weight_rows_kernel,
)
from .simd.vectors import LANES
from .target_cpu import find_native_or_emulated_amx
from .tuning.prefetch_tuning import tune_uncached_program_prefetch

QUANTISED_ACTIVATION_OPS = frozenset(("mul_mat", "mul_mat_id"))
"""Ops that quantise activations to 8 bits, in blocks of 16, if the weight is packed."""
PACKING_THREADS = os.cpu_count() or 1
"""Threads that pack weights, independent of the number of threads that run kernels."""
MIN_SHARED_PACKING_BYTES = 1 << 22
"""Minimum bytes of a matrix that several threads pack; their wake-up and wait takes as long as a megabyte."""
LOAD_CHUNK_BYTES = 1 << 24
"""Bytes of a weight that are loaded at once: enough for rare wake-ups of threads, and few compared with a model."""
HALF_DTYPES = (DType.F16, DType.BF16)
NARROW_STATE_DTYPES = frozenset(STATE_DTYPES) - {DType.F32}
LOADED_LEAVES = ("weight", "constant")
"""Kinds of leaves that `load` writes."""
COPIED_LEAF_DTYPES = {"weight": frozenset(HALF_DTYPES), "constant": frozenset[DType]()}
"""Dtypes of leaves that NumPy reads by a new float32 copy at each run.

A weight of 16 bits may lie in memory of the caller, who may change it between runs.
"""


class CpuBackend(NumpyBackend):
    """The backend for the processor of this machine: ``cpu:0`` and virtual devices, each with `threads` threads."""

    name = "cpu"

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or 1
        self._packing_pool = ThreadPoolExecutor(PACKING_THREADS, "hocket.pack")
        self._thread_pool: ThreadPool | None = None

    def with_threads(self, threads: int) -> Self:
        return type(self)(threads)

    def describe_settings(self) -> str:
        return format_count(self.threads, "thread")

    def storage_spec(self, spec: Spec, kind: str = "value") -> Spec:
        """Return the shape and dtype in which the backend stores a value.

        - Weights that are matrices keep their dtype; quantised weights are padded to whole groups of rows.
        - States that are rows of a narrow dtype, such as caches, keep their dtype.
        - All other values are float32.
        """
        if kind == "state" and len(spec.shape) == 2 and spec.dtype in STATE_DTYPES:
            return spec
        if kind in LOADED_LEAVES and len(spec.shape) >= 2:
            *leading, rows, columns = spec.shape
            if spec.dtype in FORMATS:
                return Spec((*leading, -(-rows // GROUP_ROWS) * GROUP_ROWS, columns), spec.dtype)
            if spec.dtype in HALF_DTYPES and columns % LANES == 0:
                return spec
        return super().storage_spec(spec)

    def reads_strided(self, node: Node, operand: int) -> bool:
        """Return whether kernels may read strided operands of a node: True for every op except collectives.

        All devices of a collective must make the same choice between compiled code and Python.
        """
        return node.op not in COLLECTIVES

    def has_row_independent_products(self) -> bool:
        """Return whether products give a row the same bits at any number of rows: on processors without AMX."""
        return find_native_or_emulated_amx() is None

    def tolerance(self, node: Node) -> float | None:
        """Return the relative error that quantised activations cause; None if a node computes in float32."""
        if node.op == "attention":
            from .kernels.attention.amx_matrices import compute_softmax_weight_rounding_error

            return compute_softmax_weight_rounding_error(*(value.dtype for value in node.inputs[1:3]))
        return 2.0**-8 if node.op in QUANTISED_ACTIVATION_OPS and node.inputs[0].dtype in FORMATS else None

    def split_weight(self, data: Array, declared: Spec, buffer: Any) -> Iterator[tuple[Array, Spec, Any]]:
        """Split a weight along its first axis, for loading; yield each chunk, its spec and its part of `buffer`.

        A small weight is one chunk. A chunk of a matrix is whole groups of rows. A chunk of a weight with several
        matrices is whole matrices.
        """
        stored = self.storage_spec(declared, "weight")
        if len(declared.shape) < 2 or stored.nbytes <= LOAD_CHUNK_BYTES:
            yield data, declared, buffer
            return
        together = GROUP_ROWS if len(declared.shape) == 2 else 1
        step = max(LOAD_CHUNK_BYTES * stored.shape[0] // stored.nbytes // together, 1) * together
        start = 0
        for first in range(0, declared.shape[0], step):
            rows = data[first : first + step]
            chunk_spec = Spec((len(rows), *declared.shape[1:]), declared.dtype)
            nbytes = self.storage_spec(chunk_spec, "weight").nbytes
            yield rows, chunk_spec, buffer[start : start + nbytes]
            start += nbytes

    def load(self, data: Array, declared: Spec, buffer: Any) -> None:
        stored = self.storage_spec(declared, "weight")
        if stored.dtype in HALF_DTYPES:
            view_host_tensor(buffer, Tensor(0, 0, stored.shape, contiguous_strides(stored.shape), stored.dtype))[
                ...
            ] = np.atleast_1d(data).view(stored.dtype.storage).reshape(stored.shape)
            return
        if not stored.dtype.is_quantised:
            super().load(data, declared, buffer)
            return
        *leading, rows, columns = declared.shape
        step = columns // declared.dtype.block * declared.dtype.block_bytes
        source = np.ascontiguousarray(data).reshape(int(np.prod(leading)), rows, step)
        kernel = KERNEL_FUNCTION(make_pack_weight_rows_kernel(FORMATS[declared.dtype]).address)
        for i, matrix in enumerate(source):
            target = buffer.ctypes.data + i * stored.shape[-2] * step
            block = PACK_ARGS(source=matrix.ctypes.data, stride=step, target=target, rows=rows, columns=columns)
            words = np.array(block, np.int64)
            if matrix.nbytes < MIN_SHARED_PACKING_BYTES:
                kernel(words.ctypes.data, 0, 1)
            else:
                list(
                    self._packing_pool.map(
                        lambda t, a=words: kernel(a.ctypes.data, t, PACKING_THREADS), range(PACKING_THREADS)
                    )
                )

    def compute_packing_id(self) -> str:
        """Return an identifier of the layout of packed weights, which changes with kernel sources and compilers."""
        return compute_kernel_code_digest().hex()

    def compile(self, program: Program, buffers: Sequence[Any], on: Device, comm: Comm) -> Replay:
        copies: dict[Tensor, Array] = {}
        kinds = [buffer.kind for buffer in program.buffers]

        def view(tensor: Tensor) -> Array:
            """View a tensor as float32 numbers, of constants and quantised weights by a copy."""
            plain = self.view(buffers[tensor.buffer], tensor) if not tensor.dtype.is_quantised else None
            if plain is not None and tensor.dtype not in HALF_DTYPES:
                return plain
            if tensor not in copies:
                copies[tensor] = (
                    _dequantise_weight_for_ops_without_kernel(program, buffers, tensor)
                    if plain is None
                    else dequantise(plain, tensor.dtype)
                )
            return copies[tensor]

        def in_python(i: Instruction) -> list[Callable[[], object]]:
            """Make the NumPy calls of an instruction; rows of narrow dtypes are copied to float32 and back.

            The rows of a quantised state that `set_rows` leaves are not decoded: some dtypes would not keep them.
            """
            table = i.dst[0] if i.op == "set_rows" and i.src[0] == i.dst[0] and i.dst[0].dtype.is_quantised else None
            narrow_tensors = [
                t
                for t in (*i.src, *i.dst)
                if t and t.dtype in COPIED_LEAF_DTYPES.get(kinds[t.buffer], NARROW_STATE_DTYPES) and t != table
            ]
            arrays = {t: np.empty(t.shape, np.float32) for t in narrow_tensors}
            lie = {t: self.view(buffers[t.buffer], t) for t in arrays}
            before = [partial(_copy_to_float32, lie[t], arrays[t], t.dtype) for t in arrays]
            after = [
                partial(_copy_from_float32, arrays[t], lie[t], t.dtype) for t in dict.fromkeys(i.dst) if t in arrays
            ]
            if table is not None and (rows := i.src[1]) is not None:
                floats = arrays[rows] if rows in arrays else view(rows)
                arrays[table] = self.view(buffers[table.buffer], table)
                arrays[rows] = np.empty((*rows.shape[:-1], arrays[table].shape[-1]), np.uint8)
                before.append(partial(_copy_from_float32, floats, arrays[rows], table.dtype))
            calls = self.bind_instruction(i, buffers, lambda t: arrays[t] if t in arrays else view(t), comm)
            return [*before, *calls, *after]

        if self._thread_pool is None:
            self._thread_pool = ThreadPool(self.threads)
        if (replay := load_or_bind_cached_replay(program, buffers, on, self._thread_pool, comm)) is not None:
            return replay

        from .execution.program_binding import bind_program  # imports all kernels

        tune_uncached_program_prefetch(program, buffers)
        return bind_program(program, buffers, on, self._thread_pool, comm, in_python)

    def list_fused_groups(self, program: Program, on: Device) -> Sequence[Sequence[int]]:
        return self.describe_fusion(program).order

    def describe_fusion(self, program: Program) -> ProgramFusion:
        from .execution.program_binding import describe_program_fusion

        return describe_program_fusion(program)

    def has_cached_binding(self, program: Program) -> bool:
        file = find_binding_file(program, self.threads)
        return file is not None and file.exists()

    def list_kernels(self, program: Program, on: Device) -> Sequence[KernelCall]:
        from ..numpy.kernel_table import locate_op_source
        from .execution.program_binding import list_kernel_calls

        return [*list_kernel_calls(program, self.threads, lambda i: locate_op_source(i.op))]


def _copy_to_float32(stored: Array, floats: Array, dtype: DType) -> None:
    floats[...] = decode_array(stored, dtype)


def _copy_from_float32(floats: Array, stored: Array, dtype: DType) -> None:
    stored[...] = encode_array(floats, dtype)


def _dequantise_weight_for_ops_without_kernel(program: Program, buffers: Sequence[Any], tensor: Tensor) -> Array:
    """Dequantise a view of a packed weight to float32, for ops without a kernel that reads packed weights."""
    spec = program.buffers[tensor.buffer].declared_spec
    assert spec is not None
    *leading, rows, columns = spec.shape
    count, step = int(np.prod(leading)), columns // spec.dtype.block * spec.dtype.block_bytes
    padded = -(-rows // GROUP_ROWS) * GROUP_ROWS
    whole, ids = np.empty((count, rows, columns), np.float32), np.arange(rows, dtype=np.int32)
    scratch = np.empty(1024, np.uint8)
    kernel = KERNEL_FUNCTION(make_dequantise_rows_by_id_kernel(FORMATS[spec.dtype]).address)
    for i in range(count):
        source = buffers[tensor.buffer].ctypes.data + i * padded * step
        words = UNPACK_ARGS(
            packed=source,
            stride=step,
            rows=rows,
            columns=columns,
            ids=ids.ctypes.data,
            target=whole[i].ctypes.data,
            step=4 * columns,
            count=rows,
            scratch=scratch.ctypes.data,
        )
        kernel(np.array(words, np.int64).ctypes.data, 0, 1)
    start = tensor.offset // spec.dtype.block_bytes * spec.dtype.block
    strides = [4 * s for s in tensor.strides]
    return np.ndarray(tensor.shape, np.float32, whole, 4 * start, strides)
