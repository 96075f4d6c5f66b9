"""A backend for hocket with a few ops in NumPy, in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from hocket.backends.base import Array, Comm, Device, Program, Support, run_calls
from hocket.backends.host.host_backend import HostBackend
from hocket.graph import DType, Node, Spec
from hocket.ops.quantisation import bf16_to_f32, f32_to_bf16

Kernel = Callable[..., None]


def add(a: Array, b: Array, out: Array) -> None:
    np.add(a, _tile_to_shape(b, a.shape), out=out)


def mul(a: Array, b: Array, out: Array) -> None:
    np.multiply(a, _tile_to_shape(b, a.shape), out=out)


def silu(x: Array, out: Array) -> None:
    np.divide(x, 1 + np.exp(-x), out=out)


def rms_norm(x: Array, out: Array, *, eps: float) -> None:
    mean = np.sum(x * x, axis=-1, keepdims=True) / max(1, x.shape[-1])
    np.divide(x, np.sqrt(mean + np.float32(eps)), out=out)


def mul_mat(w: Array, x: Array, out: Array, *, ordered: bool, exact: bool) -> None:
    np.matmul(bf16_to_f32(f32_to_bf16(x)), w.T, out=out)


def cont(x: Array, out: Array) -> None:
    out[...] = x


KERNELS: Mapping[str, Kernel] = {f.__name__: f for f in (add, mul, silu, rms_norm, mul_mat, cont)}


def _tile_to_shape(b: Array, shape: tuple[int, ...]) -> Array:
    """Repeat `b` until it has `shape`: the index is taken modulo the size, as ggml broadcasts."""
    b = b.reshape((1,) * (len(shape) - b.ndim) + b.shape)
    return np.tile(b, [m // n if n else 0 for n, m in zip(b.shape, shape, strict=True)])


class ToyBackend(HostBackend):
    """A backend on host memory: `HostBackend` has memory and views, this class adds the ops."""

    name = "toy"

    def supports(self, node: Node, on: Device) -> Support:
        if node.op not in KERNELS:
            return Support(False, f"hocket_toy has no kernel for {node.op}")
        if node.op == "mul_mat" and len(node.inputs[0].shape) != 2:
            return Support(False, "hocket_toy multiplies by one matrix only")
        return Support(True)

    def storage_spec(self, spec: Spec, kind: str = "value") -> Spec:
        """Return the spec in which a value is stored: floats and quantised weights are float32."""
        return Spec(spec.shape, spec.dtype if spec.dtype.is_integer else DType.F32)

    def reads_strided(self, node: Node, operand: int) -> bool:
        """Return whether an op reads strided operands; the planner inserts a `cont` before the other ops."""
        return node.op == "cont"

    def scratch(self, node: Node) -> int:
        return 0

    def tolerance(self, node: Node) -> float | None:
        """Return the relative error of one operation if it exceeds that error in float32; bfloat16 has 8 bits."""
        return 2.0**-8 if node.op == "mul_mat" else None

    def compile(self, program: Program, buffers: Sequence[Any], on: Device, comm: Comm) -> Callable[[], None]:
        calls = []
        for number, i in enumerate(program.instructions):
            arrays = [self.view(buffers[t.buffer], t) for t in (*i.src, *i.dst) if t is not None]
            calls.append((number, partial(KERNELS[i.op], *arrays, **i.attrs)))

        def replay() -> None:
            with np.errstate(all="ignore"):
                run_calls(program, on, calls)  # an error names the failed instruction

        return replay
