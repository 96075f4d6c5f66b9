"""Elementwise kernels: arithmetic, activations, gated units and dtype conversions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from ....graph.dtypes import DType
from ....ops.declaration.attributes import float_attribute
from ...fusion.dataflow import Dataflow, require_no_alias
from ...fusion.operands import BoundInstruction, Operand, require_supported
from ..binding.fused_binding import FusionBinder
from ..binding.iteration_axes import build_merged_tiling_iteration_axes
from ..binding.launch_builder import LaunchBuilder, LaunchWord, OpBinder, count_blocks
from ..device.driver import KernelInstance, KernelSource
from . import blocks
from .products import packed

ELEMENTWISE_THREADS = 256
ELEMENTS_PER_THREAD = 4
"""Elements per thread of a large result, as in ``elements.cuh``."""
MIN_MULTI_ELEMENT_COUNT = 2**17
"""Above this element count, threads that process several elements fill all multiprocessors; below, each has one."""
MAX_ELEMENTS = 2**31
ScalarReader = Callable[[BoundInstruction], Sequence[float]]


def _make_attribute_reader(*names: str) -> ScalarReader:
    """Make a function that reads the attributes `names` of an instruction, as the scalar arguments of its kernel."""
    return lambda call: [float(float_attribute(call.attrs, n)) for n in names]


def _read_scale_scalars(call: BoundInstruction) -> Sequence[float]:
    """Return the factor and the bias of a `scale` instruction. A missing bias is -0.0, which keeps the sign of -0.0."""
    return float_attribute(call.attrs, "scale"), float_attribute(call.attrs, "bias") or -0.0


def _compute_xielu_scalars(call: BoundInstruction) -> Sequence[float]:
    """Compute the four scalar arguments of the xIELU kernel (n, p, beta and eps) from the attributes."""
    alpha_n, alpha_p, beta, eps = _make_attribute_reader("alpha_n", "alpha_p", "beta", "eps")(call)
    softplus = [max(a, 0.0) + math.log1p(math.exp(-abs(a))) for a in (alpha_n, alpha_p)]
    return beta + softplus[0], softplus[1], beta, eps


def _read_clamped_swiglu_scalars(call: BoundInstruction) -> Sequence[float]:
    """Return the attributes `alpha` and `limit` of a clamped SwiGLU as scalars; 1 for an attribute that is missing."""
    return [float(float_attribute(call.attrs, n)) if n in call.attrs else 1.0 for n in ("alpha", "limit")]


_NO_SCALARS = _make_attribute_reader()
_UNARY_WITHOUT_SCALARS = (
    *("neg", "abs", "sgn", "step", "sqr", "sqrt", "log", "log1p", "exp", "expm1", "erf", "sin", "cos", "tan"),
    *("arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "arcsinh", "arccosh", "arctanh"),
    *("floor", "ceil", "round", "trunc", "sigmoid", "silu", "softplus", "relu", "elu"),
    *("gelu", "gelu_erf", "gelu_quick", "hardsigmoid", "hardswish"),
)
UNARY_OPS: Mapping[str, ScalarReader] = {
    **dict.fromkeys(_UNARY_WITHOUT_SCALARS, _NO_SCALARS),
    "leaky_relu": _make_attribute_reader("negative_slope"),
    "xielu": _compute_xielu_scalars,
    "scale": _read_scale_scalars,
    "clamp": _make_attribute_reader("min", "max"),
    "fill": _make_attribute_reader("value"),
}
BINARY_OPS: Mapping[str, ScalarReader] = {
    **dict.fromkeys(("add", "sub", "mul", "div", "maximum", "minimum", "power"), _NO_SCALARS),
    **dict.fromkeys(("reglu", "geglu", "geglu_erf", "geglu_quick", "swiglu"), _NO_SCALARS),
    "swiglu_oai": _read_clamped_swiglu_scalars,
    "swiglu_clamp": _read_clamped_swiglu_scalars,
}
CUDA_TYPE_NAMES = {
    DType.F32: "float",
    DType.F16: "half_bits",
    DType.BF16: "bf16_bits",
    DType.I8: "i8",
    DType.I16: "i16",
    DType.I32: "i32",
    DType.I64: "i64",
}
READ_TYPE_NAMES = {**CUDA_TYPE_NAMES, **blocks.BLOCK_TYPE_NAMES}
"""The C++ types of operands that kernels read as float32, with blocks of states."""
CAST_TARGETS = (DType.F32, DType.I8, DType.I16, DType.I32, DType.I64)
ROUNDING_CODES = {DType.F16: 1, DType.BF16: 2}
HALF_DTYPES = tuple(ROUNDING_CODES)
CELL_DTYPES = (DType.F32, *HALF_DTYPES)
"""Dtypes of states that kernels read and write without conversion."""

MAP_SOURCE = KernelSource(
    "elementwise.cu",
    (*(f"unary<function::{n}>" for n in UNARY_OPS), *(f"binary<function::{n}>" for n in (*BINARY_OPS, "mul_sigmoid"))),
    ("cells.cuh", "elements.cuh"),
)
CAST_SOURCE = KernelSource(
    "elementwise.cu",
    (
        *(f"cast<{CUDA_TYPE_NAMES[s]}, {CUDA_TYPE_NAMES[t]}>" for s in CUDA_TYPE_NAMES for t in CAST_TARGETS),
        *(f"cast<float, {CUDA_TYPE_NAMES[t]}>" for t in ROUNDING_CODES),
        *(f"cast<{block}, float>" for block in blocks.BLOCK_TYPE_NAMES.values()),
    ),
    ("cells.cuh", "elements.cuh"),
)
SOURCES = (MAP_SOURCE, CAST_SOURCE)


def launch_elementwise(
    launches: LaunchBuilder,
    kernel: KernelInstance,
    sources: Sequence[Operand],
    out: Operand,
    trailing_words: Sequence[LaunchWord],
    *leading_words: LaunchWord,
) -> None:
    """Launch an elementwise kernel over the elements of `out`; the sources are broadcast to its shape.

    Args:
        launches: Receives the launch.
        kernel: A kernel of an elementwise struct.
        sources: The operands.
        out: The result.
        trailing_words: Launch words behind the operands.
        leading_words: Launch words in front of the axes.
    """
    operands = [*sources, out]
    axes = build_merged_tiling_iteration_axes(out.shape, operands)
    require_supported(
        axes.element_count < MAX_ELEMENTS, f"a result of {axes.element_count} elements is too large for one launch"
    )
    walks = [word for k, o in enumerate(operands) for word in axes.make_address_and_stride_fields(k, o)]
    words = [axes.element_count, *leading_words, *axes.axes_struct_fields, *walks, *trailing_words]
    launches.add_launch(kernel, count_elementwise_blocks(axes.element_count), ELEMENTWISE_THREADS, words)


def count_elementwise_blocks(count: int) -> int:
    """Return the number of thread blocks of an elementwise launch over `count` elements.

    The kernel loop ``each_element`` in ``elements.cuh`` derives the elements per thread from this number.
    """
    return count_blocks(count, ELEMENTWISE_THREADS * (ELEMENTS_PER_THREAD if count > MIN_MULTI_ELEMENT_COUNT else 1))


def as_float(launches: LaunchBuilder, x: Operand) -> Operand:
    """Return `x` itself if it is float32, else a copy in scratch memory that is converted to float32."""
    return packed.dequantise_weight(launches, x) if x.has_packed_layout else as_type(launches, x, DType.F32)


def as_type(launches: LaunchBuilder, x: Operand, dtype: DType) -> Operand:
    """Return `x` itself if it has this dtype, else a converted copy in scratch memory."""
    if x.dtype is dtype:
        return x
    require_supported(
        x.dtype in READ_TYPE_NAMES and dtype in CAST_TARGETS, f"kernels that read {x.dtype} as {dtype} here are missing"
    )
    copy = launches.allocate_scratch(x.shape, dtype)
    launch_cast(launches, x, copy)
    return copy


def launch_cast(launches: LaunchBuilder, x: Operand, out: Operand, rounding: DType | None = None) -> None:
    """Launch a conversion of `x` to the dtype of `out`.

    Args:
        launches: Receives the launch.
        x: The operand.
        out: The result.
        rounding: A 16-bit dtype to which values are rounded before the conversion, or `None`.

    Raises:
        NoKernelError: No kernel converts between these dtypes.
    """
    if x.has_packed_layout or out.dtype in ROUNDING_CODES or out.dtype.is_quantised:
        x = as_float(launches, x)
    if out.dtype.is_quantised:
        return blocks.launch_block_store(launches, x, out)
    if x.dtype.is_quantised and out.dtype is not DType.F32:
        x = as_float(launches, x)
    require_supported(x.dtype in READ_TYPE_NAMES, f"casts from {x.dtype} are missing")
    kernel = CAST_SOURCE[f"cast<{READ_TYPE_NAMES[x.dtype]}, {CUDA_TYPE_NAMES[out.dtype]}>"]
    launch_elementwise(launches, kernel, [x], out, [], ROUNDING_CODES.get(rounding, 0) if rounding else 0)
    return None


def _pad_to_four_scalars(scalars: Sequence[float]) -> list[float]:
    """Pad scalar arguments with zeros to four scalars, the number that every kernel takes."""
    return [*map(float, scalars), 0.0, 0.0, 0.0, 0.0][:4]


def launch_unary(launches: LaunchBuilder, op: str, x: Operand, out: Operand, scalars: Sequence[float] = ()) -> None:
    """Launch a unary elementwise op, such as `neg` or `silu`.

    Args:
        launches: Receives the launch.
        op: The name of the op.
        x: The operand.
        out: The result.
        scalars: Up to four scalar arguments.
    """
    source = as_float(launches, x)
    launch_elementwise(launches, MAP_SOURCE[f"unary<function::{op}>"], [source], out, _pad_to_four_scalars(scalars))


def launch_binary(
    launches: LaunchBuilder, op: str, x: Operand, y: Operand, out: Operand, scalars: Sequence[float] = ()
) -> None:
    """Launch a binary elementwise op, such as `add` or `swiglu`.

    Args:
        launches: Receives the launch.
        op: The name of the op.
        x: The first operand.
        y: The second operand.
        out: The result.
        scalars: Up to four scalar arguments.
    """
    sources = [as_float(launches, x), as_float(launches, y)]
    launch_elementwise(launches, MAP_SOURCE[f"binary<function::{op}>"], sources, out, _pad_to_four_scalars(scalars))


def _make_unary_binder(numbers: ScalarReader) -> OpBinder:
    return lambda launches, call: launch_unary(launches, call.op, call.operand(0), call.out, numbers(call))


def _make_binary_binder(numbers: ScalarReader) -> OpBinder:
    def bind(launches: LaunchBuilder, call: BoundInstruction) -> None:
        launch_binary(launches, call.op, call.operand(0), call.operand(1), call.out, numbers(call))

    return bind


def _bind_glu(launches: LaunchBuilder, call: BoundInstruction) -> None:
    """Bind `glu`, a gated linear unit: gate and value are the two halves of the operand's last axis."""
    x, kind, n = as_float(launches, call.operand(0)), str(call.attrs["kind"]), call.out.shape[-1]
    axis = len(x.shape) - 1
    halves = [x.slice_axis(axis, 0, n), x.slice_axis(axis, n, n)]
    gate, up = halves[::-1] if call.attrs["swapped"] else halves
    launch_binary(launches, kind, gate, up, call.out, BINARY_OPS[kind](call))


def _match_activation_product(
    launches: LaunchBuilder, flow: Dataflow, number: int
) -> tuple[Operand, Operand, BoundInstruction, Sequence[int]]:
    """Match an activation and the multiplication that has the activated value as one factor.

    Returns:
        The operand of the activation, the other factor, the multiplication, and the indices of both instructions.
    """
    product = flow.require_readers(number)[0]
    index = 1 if flow.is_whole_result_operand_of(number, product, 1) else 0
    require_supported(flow.require_sole_reader(number, "mul", index) == product, "it is not a factor of one product")
    gate, other, last = (
        flow.bound_instruction(number).operand(0),
        flow.bound_instruction(product).operand(1 - index),
        flow.bound_instruction(product),
    )
    require_supported(
        gate.is_float and other.is_float and gate.shape == other.shape == last.out.shape, "the factors differ"
    )
    require_no_alias(last.out, [], [gate, other])
    return gate, other, last, (number, product)


def _fuse_times_sigmoid(launches: LaunchBuilder, flow: Dataflow, number: int) -> Sequence[int]:
    gate, other, product, numbers = _match_activation_product(launches, flow, number)
    launch_binary(launches, "mul_sigmoid", other, gate, product.out)
    return numbers


def _fuse_times_silu(launches: LaunchBuilder, flow: Dataflow, number: int) -> Sequence[int]:
    gate, other, product, numbers = _match_activation_product(launches, flow, number)
    launch_binary(launches, "swiglu", gate, other, product.out)
    return numbers


def _bind_cast(launches: LaunchBuilder, call: BoundInstruction) -> None:
    x, out, dtype = call.operand(0), call.out, call.attrs["dtype"]
    assert isinstance(dtype, DType)
    if not dtype.is_quantised:
        return launch_cast(launches, x, out, dtype)
    require_supported(dtype in blocks.KERNELS, f"casts to {dtype} are missing")
    require_supported(out.is_dense, f"casts to {dtype} with a strided result are missing")
    if not (x.is_float and x.is_dense):
        launch_cast(launches, x, out)
        x = out
    return blocks.launch_rounding_to_block_values(launches, x, out, dtype)


FUSED: Mapping[str, Sequence[FusionBinder]] = {"sigmoid": (_fuse_times_sigmoid,), "silu": (_fuse_times_silu,)}
BINDINGS: Mapping[str, OpBinder] = {
    **{name: _make_unary_binder(numbers) for name, numbers in UNARY_OPS.items()},
    **{name: _make_binary_binder(numbers) for name, numbers in BINARY_OPS.items()},
    "glu": _bind_glu,
    "cast": _bind_cast,
}
