"""Elementwise kernels: arithmetic, activations, gated units and dtype conversions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from ....graph.dtypes import DType
from ....ops.declaration.attributes import float_attribute
from ...flow import Flow, apart
from ...operands import Bound, Operand, need
from ..binding.axes import axes_of
from ..binding.chains import Fused
from ..binding.launches import Binding, Launches, Word, blocks
from ..binding.packing import PACKINGS
from ..device.driver import Kernel, Source
from .products import packed

THREADS = 256
ELEMENTS = 4
"""Elements per thread of a large result, as in ``elements.cuh``."""
LARGE = 2**17
"""Above this element count, threads that process several elements fill all multiprocessors; below, each has one."""
MOST_ELEMENTS = 2**31
Numbers = Callable[[Bound], Sequence[float]]


def _attributes(*names: str) -> Numbers:
    """Return a function that reads attributes as the scalar arguments of a kernel."""
    return lambda call: [float(float_attribute(call.attrs, n)) for n in names]


def _scale_constants(call: Bound) -> Sequence[float]:
    """Return factor and bias. A missing bias is -0.0, which preserves the sign of zeros."""
    return float_attribute(call.attrs, "scale"), float_attribute(call.attrs, "bias") or -0.0


def _xielu(call: Bound) -> Sequence[float]:
    """Return n, p, beta and eps."""
    alpha_n, alpha_p, beta, eps = _attributes("alpha_n", "alpha_p", "beta", "eps")(call)
    softplus = [max(a, 0.0) + math.log1p(math.exp(-abs(a))) for a in (alpha_n, alpha_p)]
    return beta + softplus[0], softplus[1], beta, eps


def _clamped(call: Bound) -> Sequence[float]:
    """Return alpha and limit, or 1 for an attribute that the unit does not have."""
    return [float(float_attribute(call.attrs, n)) if n in call.attrs else 1.0 for n in ("alpha", "limit")]


_NOTHING = _attributes()
_PLAIN = (
    *("neg", "abs", "sgn", "step", "sqr", "sqrt", "log", "log1p", "exp", "expm1", "erf", "sin", "cos", "tan"),
    *("arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "arcsinh", "arccosh", "arctanh"),
    *("floor", "ceil", "round", "trunc", "sigmoid", "silu", "softplus", "relu", "elu"),
    *("gelu", "gelu_erf", "gelu_quick", "hardsigmoid", "hardswish"),
)
UNARY: Mapping[str, Numbers] = {
    **dict.fromkeys(_PLAIN, _NOTHING),
    "leaky_relu": _attributes("negative_slope"),
    "xielu": _xielu,
    "scale": _scale_constants,
    "clamp": _attributes("min", "max"),
    "fill": _attributes("value"),
}
BINARY: Mapping[str, Numbers] = {
    **dict.fromkeys(("add", "sub", "mul", "div", "maximum", "minimum", "power"), _NOTHING),
    **dict.fromkeys(("reglu", "geglu", "geglu_erf", "geglu_quick", "swiglu"), _NOTHING),
    "swiglu_oai": _clamped,
    "swiglu_clamp": _clamped,
}
TYPES = {
    DType.F32: "float",
    DType.F16: "half_bits",
    DType.BF16: "bf16_bits",
    DType.I8: "i8",
    DType.I16: "i16",
    DType.I32: "i32",
    DType.I64: "i64",
}
TARGETS = (DType.F32, DType.I8, DType.I16, DType.I32, DType.I64)
ROUNDING = {DType.F16: 1, DType.BF16: 2}
HALVES = tuple(ROUNDING)
CELLS = (DType.F32, *HALVES)
"""Dtypes of states that kernels read and write without conversion."""

MAPS = Source(
    "elementwise.cu",
    (*(f"unary<function::{n}>" for n in UNARY), *(f"binary<function::{n}>" for n in (*BINARY, "mul_sigmoid"))),
    ("cells.cuh", "elements.cuh"),
)
CASTS = Source(
    "elementwise.cu",
    (
        *(f"cast<{TYPES[s]}, {TYPES[t]}>" for s in TYPES for t in TARGETS),
        *(f"cast<float, {TYPES[t]}>" for t in ROUNDING),
    ),
    ("cells.cuh", "elements.cuh"),
)
SOURCES = (MAPS, CASTS)


def launch_map(
    launches: Launches, kernel: Kernel, sources: Sequence[Operand], out: Operand, tail: Sequence[Word], *ahead: Word
) -> None:
    """Launch an elementwise kernel over `out`. The sources are broadcast to its shape.

    Args:
        launches: Receives the launch.
        kernel: A kernel of an elementwise struct.
        sources: The operands.
        out: The result.
        tail: Words behind the operands.
        ahead: Words in front of the axes.
    """
    operands = [*sources, out]
    axes = axes_of(out.shape, operands)
    need(axes.count < MOST_ELEMENTS, f"a result of {axes.count} elements is too large for one launch")
    walks = [word for k, o in enumerate(operands) for word in axes.walk(k, o)]
    words = [axes.count, *ahead, *axes.words, *walks, *tail]
    launches.add(kernel, spread(axes.count), THREADS, words)


def spread(count: int) -> int:
    """Return the number of blocks. ``each_element`` in ``elements.cuh`` derives the elements per thread from it."""
    return blocks(count, THREADS * (ELEMENTS if count > LARGE else 1))


def as_float(launches: Launches, x: Operand) -> Operand:
    """Return `x` as float32: itself, or a copy in scratch."""
    return packed.expanded(launches, x) if x.dtype in PACKINGS else as_type(launches, x, DType.F32)


def as_type(launches: Launches, x: Operand, dtype: DType) -> Operand:
    """Return `x` in a dtype: itself, or a copy in scratch."""
    if x.dtype is dtype:
        return x
    need(x.dtype in TYPES and dtype in TARGETS, f"kernels that read {x.dtype} as {dtype} here are missing")
    copy = launches.scratch(x.shape, dtype)
    launch_cast(launches, x, copy)
    return copy


def launch_cast(launches: Launches, x: Operand, out: Operand, rounding: DType | None = None) -> None:
    """Convert `x` to the dtype of `out`.

    Args:
        launches: Receives the launch.
        x: The operand.
        out: The result.
        rounding: Round values to this dtype first.

    Raises:
        NoKernelError: No kernel converts between these dtypes.
    """
    if x.dtype in PACKINGS:
        x = packed.expanded(launches, x)
    if out.dtype in ROUNDING:
        x = as_float(launches, x)
    need(x.dtype in TYPES, f"casts from {x.dtype} are missing")
    kernel = CASTS[f"cast<{TYPES[x.dtype]}, {TYPES[out.dtype]}>"]
    launch_map(launches, kernel, [x], out, [], ROUNDING.get(rounding, 0) if rounding else 0)


def _padded(numbers: Sequence[float]) -> list[float]:
    """Return four scalar arguments, padded with zeros."""
    return [*map(float, numbers), 0.0, 0.0, 0.0, 0.0][:4]


def launch_unary(launches: Launches, op: str, x: Operand, out: Operand, numbers: Sequence[float] = ()) -> None:
    """Launch a unary op.

    Args:
        launches: Receives the launch.
        op: The name of the op.
        x: The operand.
        out: The result.
        numbers: Up to four scalar arguments.
    """
    source = as_float(launches, x)
    launch_map(launches, MAPS[f"unary<function::{op}>"], [source], out, _padded(numbers))


def launch_binary(
    launches: Launches, op: str, x: Operand, y: Operand, out: Operand, numbers: Sequence[float] = ()
) -> None:
    """Launch a binary op, such as `add` or `swiglu`.

    Args:
        launches: Receives the launch.
        op: The name of the op.
        x: The first operand.
        y: The second operand.
        out: The result.
        numbers: Up to four scalar arguments.
    """
    sources = [as_float(launches, x), as_float(launches, y)]
    launch_map(launches, MAPS[f"binary<function::{op}>"], sources, out, _padded(numbers))


def _unary(numbers: Numbers) -> Binding:
    return lambda launches, call: launch_unary(launches, call.op, call.operand(0), call.out, numbers(call))


def _binary(numbers: Numbers) -> Binding:
    def bind(launches: Launches, call: Bound) -> None:
        launch_binary(launches, call.op, call.operand(0), call.operand(1), call.out, numbers(call))

    return bind


def _glu(launches: Launches, call: Bound) -> None:
    """Bind a gated unit of the two halves of one operand."""
    x, kind, n = as_float(launches, call.operand(0)), str(call.attrs["kind"]), call.out.shape[-1]
    axis = len(x.shape) - 1
    halves = [x.part(axis, 0, n), x.part(axis, n, n)]
    gate, up = halves[::-1] if call.attrs["swapped"] else halves
    launch_binary(launches, kind, gate, up, call.out, BINARY[kind](call))


def _cast(launches: Launches, call: Bound) -> None:
    dtype = call.attrs["dtype"]
    assert isinstance(dtype, DType)
    launch_cast(launches, call.operand(0), call.out, dtype)


def _multiplied(launches: Launches, flow: Flow, number: int) -> tuple[Operand, Operand, Bound, Sequence[int]]:
    """Match an activation and the product that reads it.

    Returns:
        The operand of the activation, the other factor, the product, and the instructions.
    """
    product = flow.readers_of(number)[0]
    index = 1 if flow.makes(number, product, 1) else 0
    need(flow.reader(number, "mul", index) == product, "it is not a factor of one product")
    gate, other, last = flow.call(number).operand(0), flow.call(product).operand(1 - index), flow.call(product)
    need(gate.is_float and other.is_float and gate.shape == other.shape == last.out.shape, "the factors differ")
    apart(last.out, [], [gate, other])
    return gate, other, last, (number, product)


def _times_sigmoid(launches: Launches, flow: Flow, number: int) -> Sequence[int]:
    gate, other, product, numbers = _multiplied(launches, flow, number)
    launch_binary(launches, "mul_sigmoid", other, gate, product.out)
    return numbers


def _times_silu(launches: Launches, flow: Flow, number: int) -> Sequence[int]:
    gate, other, product, numbers = _multiplied(launches, flow, number)
    launch_binary(launches, "swiglu", gate, other, product.out)
    return numbers


FUSED: Mapping[str, Sequence[Fused]] = {"sigmoid": (_times_sigmoid,), "silu": (_times_silu,)}
BINDINGS: Mapping[str, Binding] = {
    **{name: _unary(numbers) for name, numbers in UNARY.items()},
    **{name: _binary(numbers) for name, numbers in BINARY.items()},
    "glu": _glu,
    "cast": _cast,
}
