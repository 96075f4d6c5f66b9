"""The kernel of every block quantiser: a loop over the blocks of rows, around the function that quantises one block."""

from __future__ import annotations

from collections.abc import Callable

from .....graph.dtypes import DType
from ...compilation.compiler import Kernel, KernelBody, kernel, subroutine
from ...compilation.kernel_args import declare_args
from ...steps.partition import compute_thread_range
from .lattice_search import LATTICE_SCRATCH_BYTES

ARGS = declare_args("x y importance rows columns scratch table")
"""Addresses of float32 rows, of the stored rows, of one float32 for each column, and of the lookup table.

The importances and the table may be 0. The scratch has `LATTICE_SCRATCH_BYTES` for each thread.
"""


def row_quantiser(dtype: DType) -> Callable[[KernelBody], Kernel]:
    """Return a decorator that makes the kernel which quantises rows to `dtype`, from a function for one block.

    ``quantise_block(x, importance, scratch, table, block)`` gets the addresses of the numbers of the block, of their
    importances or 0, of the scratch memory of the thread, of the lookup table, and of the stored block.
    """
    numbers, nbytes = dtype.block, dtype.block_bytes

    def decorate(quantise_block: KernelBody) -> Kernel:
        quantise = subroutine(quantise_block)

        def quantise_rows(a, thread, threads):
            x, y, importance, columns, table = ARGS.x(a), ARGS.y(a), ARGS.importance(a), ARGS.columns(a), ARGS.table(a)
            scratch = ARGS.scratch(a) + LATTICE_SCRATCH_BYTES * thread
            first, end = compute_thread_range(ARGS.rows(a), thread, threads)
            for i in range(first, end):
                for c in range(0, columns, numbers):
                    at, weights = i * columns + c, importance + 4 * c if importance != 0 else 0
                    quantise(x + 4 * at, weights, scratch, table, y + at // numbers * nbytes)
            return 0

        quantise_rows.__name__, quantise_rows.__module__ = quantise_block.__name__, quantise_block.__module__
        return kernel(quantise_rows)

    return decorate
