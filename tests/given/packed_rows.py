"""Weights as the CPU backend packs them, and activations as it rounds them, by its kernels."""

from __future__ import annotations

import numpy as np

from hocket.backends.cpu.compilation import compiler
from hocket.backends.cpu.compilation.compiler import KERNEL_FUNCTION
from hocket.backends.cpu.kernels.matmul import tile_loops
from hocket.backends.cpu.kernels.packed import activation_quantisation, weight_packing
from hocket.backends.cpu.kernels.packed.format_table import FORMATS
from hocket.backends.cpu.steps.work_queue import QUEUE_BYTES
from hocket.graph.dtypes import DType
from hocket.ops.quantisation import bf16_to_f32, f32_to_bf16


def call(kernel: compiler.Kernel, *words: object, thread: int = 0, threads: int = 1) -> int:
    block = np.array([w.ctypes.data if isinstance(w, np.ndarray) else w for w in words], np.int64)
    return int(KERNEL_FUNCTION(kernel.address)(block.ctypes.data, thread, threads))


def pack_rows(dtype: DType, raw: np.ndarray, columns: int, threads: int = 1) -> np.ndarray:
    """Return rows in the layout of the kernels: packed, or unchanged."""
    if dtype not in FORMATS:
        return raw.reshape(-1)
    target = np.zeros(-(-len(raw) // 16) * 16 * raw.shape[1], np.uint8)
    for thread in range(threads):
        words = (raw, raw.shape[1], target, len(raw), columns)
        assert (
            call(weight_packing.make_pack_weight_rows_kernel(FORMATS[dtype]), *words, thread=thread, threads=threads)
            == 0
        )
    return target


RECORD = np.dtype(
    [("codes", np.int8, (2, 16)), ("scales", np.float32, 2), ("starts", np.float32, 2), ("sums", np.int32, 2)]
)
"""32 rounded activations as a kernel leaves them."""


def target_of(x: np.ndarray, kind: int) -> np.ndarray:
    """Bytes of rows as the kernel rounds them, aligned as it leaves them."""
    rows, columns = x.shape
    nbytes = activation_quantisation.compute_quantised_activation_bytes(rows, columns, kind)
    raw = np.zeros(nbytes + compiler.ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % compiler.ALIGNMENT
    target, pitch = (
        raw[start : start + nbytes],
        activation_quantisation.compute_quantised_activation_bytes(1, columns, kind),
    )
    assert (
        call(activation_quantisation.quantise_activation_rows, x, 4 * columns, rows, columns, 1, target, pitch, kind)
        == 0
    )
    return target


def quantise_rows(x: np.ndarray, zero: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows as the kernel rounds them, and the numbers that its codes stand for."""
    rows, columns = x.shape
    target = target_of(x, zero)
    records = target.view(RECORD).reshape(rows, -1)
    codes, scales = records["codes"].astype(np.int64), records["scales"][..., None].astype(np.float64)
    begin = 1.5 * 2**23
    assert np.array_equal(records["starts"].astype(np.float64), -begin * scales[..., 0]), "these are exact"
    if zero:
        assert np.array_equal(records["sums"].view(np.float32), begin - zero * codes.sum(-1))
    else:
        sums = (codes * scales).sum(-1)
        want, size = np.stack([sums.sum(-1), sums[..., 1]], -1), np.abs(codes * scales).sum((-2, -1))
        assert (np.abs(records["sums"].view(np.float32) - want) <= 1e-6 * size[..., None] + 1e-44).all()
    return target, (codes * scales).reshape(rows, columns)


def round_to_bf16(x: np.ndarray) -> np.ndarray:
    """The nearest bfloat16, as float64."""
    return bf16_to_f32(f32_to_bf16(x.astype(np.float32))).astype(np.float64)


def tile_operands(dtype: DType, x: np.ndarray) -> np.ndarray:
    """Weights of a type, or activations that meet them, as tiles multiply them: float64."""
    return round_to_bf16(x) if dtype in FORMATS else x.astype(np.float64)


def aligned_scratch(nbytes: int) -> np.ndarray:
    """NaN, aligned as kernels want it."""
    raw = np.full(nbytes + compiler.ALIGNMENT, 255, np.uint8)
    start = -raw.ctypes.data % compiler.ALIGNMENT
    return raw[start : start + nbytes]


def multiply_in_tiles(
    kernel: compiler.Kernel,
    tiling: tile_loops.WeightTiling,
    weight: np.ndarray,
    stride: int,
    shape: tuple[int, int],
    x: np.ndarray,
    threads: int = 1,
) -> np.ndarray:
    """Multiply activation rows with a weight of some rows and columns. The threads of the kernel run in turn.

    Rows of the weight are `stride` bytes apart. Several threads take work from a queue.
    """
    (rows, columns), count = shape, len(x)
    y, slots = np.full((count, rows), np.nan, np.float32), np.array([0, count, count, *range(count)], np.int32)
    scratch, tickets = aligned_scratch(threads * tiling.scratch_bytes), np.zeros(QUEUE_BYTES, np.uint8)
    words = tile_loops.ARGS(
        w=weight.ctypes.data,
        stride=stride,
        between=0,
        rows=rows,
        columns=columns,
        x=x.ctypes.data,
        pitch=x.strides[0],
        starts=slots.ctypes.data,
        experts=1,
        used=1,
        shared=1,
        y=y.ctypes.data,
        step=y.strides[0],
        scratch=scratch.ctypes.data,
        l1_ahead=64,
        l2_ahead=128,
        tickets=tickets.ctypes.data if threads > 1 else 0,
        first_column=0,
        prologue=0,
        hooks=[0],
    )
    for thread in range(threads):
        assert call(kernel, *words, thread=thread, threads=threads) == 0
    return y
