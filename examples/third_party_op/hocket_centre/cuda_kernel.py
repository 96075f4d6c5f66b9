"""The CUDA kernel, which also runs in the emulation without a GPU: one thread block for each row."""

from __future__ import annotations

from pathlib import Path

from hocket.backends.cupy.binding.launch_builder import LaunchBuilder
from hocket.backends.cupy.device.driver import KernelSource
from hocket.backends.cupy.kernels.elementwise import as_float
from hocket.backends.fusion.operands import BoundInstruction, require_supported

SOURCE = KernelSource(str(Path(__file__).with_name("centre.cu")), ("centre",))
THREADS = 128


def bind(launches: LaunchBuilder, call: BoundInstruction) -> None:
    """Add the launch for one instruction; an operand of another dtype is converted first.

    Raises:
        NoKernelError: Rows are not dense.
    """
    x, y = as_float(launches, call.operand(0)), call.out
    require_supported(x.is_dense and y.is_dense, "rows are not dense")
    columns = x.shape[-1]
    rows = y.tensor.spec.size // columns if columns else 0
    launches.add_launch(SOURCE["centre"], rows, THREADS, [columns, x, y])
