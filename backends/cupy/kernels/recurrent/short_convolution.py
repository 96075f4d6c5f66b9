"""Kernels around the delta rule: short convolution with activation, norms and gates, and the gated output norm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType

from .....graph.dtypes import DType
from .....ops.declaration.attributes import float_attribute as attribute
from ....base import contiguous_strides
from ....fusion.dataflow import Dataflow, has_same_elements, require_no_alias
from ....fusion.operand_views import find_strides_of_reshape
from ....fusion.operands import BoundInstruction, Operand, require_supported
from ....fusion.patterns import match_short_convolution
from ...binding.fused_binding import FusionBinder
from ...binding.launch_builder import LaunchBuilder, LaunchWord, OpBinder, count_blocks
from ...device.driver import KernelSource
from ..elementwise import as_float
from .delta_gates import (
    NO_GATE_PRODUCTS,
    DecayAndRateInstructions,
    GateProducts,
    match_gate_products,
    match_gates,
    require_gate_operands,
)
from .states import DELTA_INPUTS_HEADER, RECURRENT_HEADER, is_vector_aligned, make_rows_struct_fields

CONVOLUTION_THREADS = 256
TOKENS_PER_THREAD = 16
"""Tokens that a thread processes one after the other."""
INPUT_SIZES = (16, 32, 64, 128)
NORM_SIZES = (*INPUT_SIZES, 256)

_HEADERS = RECURRENT_HEADER, DELTA_INPUTS_HEADER
CONVOLUTION_SOURCE = KernelSource("short_convolution.cu", ("short_convolution",), _HEADERS)
INPUTS_SOURCE = KernelSource("short_convolution.cu", tuple(f"delta_inputs<{d}>" for d in INPUT_SIZES), _HEADERS)
NORM_SOURCE = KernelSource("short_convolution.cu", tuple(f"gated_norm<{d}>" for d in NORM_SIZES), _HEADERS)


def _add_head_axis(x: Operand) -> Operand:
    """Return a view of x [..., rows, channels] with a head axis of size 1: [..., rows, 1, channels]."""
    t = x.tensor
    shape, strides = (*t.shape[:-1], 1, t.shape[-1]), (*t.strides[:-1], 0, t.strides[-1])
    return Operand(x.address, type(t)(t.buffer, t.offset, shape, strides, t.dtype), x.declared_spec, x.stored_spec)


def _bind_ssm_conv(launches: LaunchBuilder, call: BoundInstruction) -> None:
    x, w, out = as_float(launches, call.operand(0)), as_float(launches, call.operand(1)), call.out
    *leading, tokens, channels = out.shape
    words = [
        *make_rows_struct_fields(_add_head_axis(x)),
        *make_rows_struct_fields(_add_head_axis(out)),
        w,
        *w.strides,
        tokens,
        channels,
        w.shape[-1],
    ]
    grid = count_blocks(channels, CONVOLUTION_THREADS), count_blocks(tokens, TOKENS_PER_THREAD), prod(leading)
    launches.add_launch(CONVOLUTION_SOURCE["short_convolution"], grid, CONVOLUTION_THREADS, words)


@dataclass(frozen=True, slots=True)
class DeltaRuleInputs:
    """The inputs of the delta rule (q, k, v, g and beta), which the kernel `delta_inputs` writes.

    - `q`, `k`: queries and keys [B, T, key heads, size].
    - `v`: values [B, T, value heads, size].
    - `g`, `beta`: log decays and learning rates [B, T, value heads].
    - `next_rows`: the last rows of the convolution [B, 3, channels].
    - `saved_rows`: the old values of `next_rows`, if they are needed.

    All are contiguous except `v`, where only each token's heads are.
    """

    q: Operand
    k: Operand
    v: Operand
    g: Operand
    beta: Operand
    next_rows: Operand
    saved_rows: Operand | None = None


@dataclass(frozen=True, slots=True)
class DeltaNetWeights:
    """The contiguous weights of a gated delta net layer, without its linear layers.

    `w`: the convolution [channels, 4]. `a`: -exp(A_log) [value heads]. `dt`: the bias of the steps [value heads].
    """

    w: Operand
    a: Operand
    dt: Operand


@dataclass(frozen=True, slots=True)
class OperandsBeforeDeltaRule:
    """The operands from which a kernel computes the inputs of the delta rule, by convolution, SiLU, norms and gates.

    ``frontends/models/layers/gated_delta_net.py`` has the decomposition.

    - `x`: input of the convolution [B, T, channels].
    - `alpha`, `beta`: logits of decays and learning rates from a linear layer [B, T, groups, value heads of a group].
    - `valid`: 0 for padding tokens [B, T].
    - `old`: rows before the first token [B, 3, channels]. They may be the memory of `next_rows`.
    - `layer`: the weights.
    - `eps`: epsilon of the norms.
    - `ids`: numbers of the rows to keep [B, 3], where 0 is the first of `old`. Without them the last rows are kept.
    - `fault`: the fields of the fault for illegal row numbers.
    - `products`: computes `alpha` and `beta`, which are not read then.
    """

    x: Operand
    alpha: Operand
    beta: Operand
    valid: Operand | None
    old: Operand
    layer: DeltaNetWeights
    eps: float
    ids: Operand | None = None
    fault: Sequence[LaunchWord] = (0, 0)
    products: GateProducts | None = None

    @property
    def operands(self) -> list[Operand | None]:
        """All operands that kernels read."""
        layer, products = self.layer, self.products
        logits = [self.alpha, self.beta] if products is None else [products.x, products.alpha, products.beta]
        return [self.x, self.valid, self.old, layer.w, layer.a, layer.dt, self.ids, *logits]

    def make_struct_fields(self, inputs: DeltaRuleInputs) -> list[LaunchWord]:
        """Return the fields of the C struct `DeltaSources`; raise `NoKernelError` for an unsupported size of heads."""
        size = inputs.k.shape[-1]
        require_supported(size in INPUT_SIZES and inputs.v.shape[-1] == size, f"heads of {size} are not convolved")
        _, tokens, key_heads, _ = inputs.k.shape
        rows = (_add_head_axis(self.x), self.alpha, self.beta)
        return [
            *(word for x in rows for word in make_rows_struct_fields(x)),
            self.alpha.shape[-1],
            self.layer.w,
            self.valid or 0,
            self.layer.a,
            self.layer.dt,
            self.old,
            self.ids or 0,
            inputs.next_rows,
            inputs.saved_rows or 0,
            *self.fault,
            tokens,
            key_heads,
            inputs.v.shape[-2],
            self.x.shape[-1],
            self.eps,
            *(NO_GATE_PRODUCTS if self.products is None else self.products.words),
        ]


DeltaNetLauncher = Callable[[LaunchBuilder, OperandsBeforeDeltaRule, DeltaRuleInputs], None]
"""A function that launches the computation of the delta rule's operands, or of all of the rule."""


def launch_delta_net_inputs(launches: LaunchBuilder, sources: OperandsBeforeDeltaRule, inputs: DeltaRuleInputs) -> None:
    """Launch the kernel that computes the operands of the delta rule: convolution, SiLU, norms and gates.

    Args:
        launches: Receives the launch.
        sources: The operands of the computation.
        inputs: The results.
    """
    sequences, tokens, key_heads, size = inputs.k.shape
    value_heads, heads_of_block = inputs.v.shape[-2], CONVOLUTION_THREADS * 4 // size
    words = [*sources.make_struct_fields(inputs), inputs.q, inputs.k, inputs.g, inputs.beta]
    words += make_rows_struct_fields(inputs.v)
    grid = (
        count_blocks(tokens, TOKENS_PER_THREAD),
        count_blocks(2 * key_heads + value_heads, heads_of_block) + (value_heads if sources.products else 1),
        sequences,
    )
    launches.add_launch(INPUTS_SOURCE[f"delta_inputs<{size}>"], grid, CONVOLUTION_THREADS, words)


def launch_gated_rms_norm(
    launches: LaunchBuilder, x: Operand, z: Operand, w: Operand, out: Operand, eps: float
) -> None:
    """Launch a gated RMS norm over the last axis: ``rms_norm(x) * w * silu(z)``.

    Args:
        launches: Receives the launch.
        x: The operand of the norm [..., T, heads, size].
        z: The gate, with the shape of x.
        w: The factors of the norm [size].
        out: The result, with the shape of x.
        eps: Epsilon of the norm.
    """
    *leading, tokens, heads, size = x.shape
    require_supported(size in NORM_SIZES, f"heads of {size} have no gated norm")
    sequences = prod(leading)
    lanes = min(size // 4, 32)
    words = [
        *make_rows_struct_fields(x),
        *make_rows_struct_fields(z),
        *make_rows_struct_fields(out),
        w,
        sequences,
        tokens,
        heads,
        eps,
    ]
    grid = count_blocks(sequences * tokens * heads, CONVOLUTION_THREADS // lanes)
    launches.add_launch(NORM_SOURCE[f"gated_norm<{size}>"], grid, CONVOLUTION_THREADS, words)


# --------------------------------------------------------------------------------------------------------- fusions


def _fuse_delta_net_inputs_and_logits(launches: LaunchBuilder, flow: Dataflow, number: int) -> Sequence[int]:
    """Compute the delta rule's inputs, and the matmuls for the logits of its decays and rates, in one launch."""
    require_supported(launches.limits.computes_operands, "gates compute no logits")
    return fuse_delta_net_inputs(launches, flow, number, match_gate_products)


def fuse_delta_net_inputs(
    launches: LaunchBuilder,
    flow: Dataflow,
    number: int,
    match_products: Callable[[Dataflow, DecayAndRateInstructions], GateProducts | None] = lambda flow, gates: None,
    launch: DeltaNetLauncher = launch_delta_net_inputs,
) -> Sequence[int]:
    """Compute the ops between the linear layers and the delta rule in one launch: convolution, SiLU, norms, gates."""
    _, conv, silu, (q, k), last, save = match_short_convolution(flow, number)
    rule = find_delta_rule_or_activation(flow, silu)
    require_supported({*flow.require_readers(silu)} == {q, k, rule}, "the convolution is read otherwise")
    require_supported(
        (flow.require_producer(rule, 0), flow.require_producer(rule, 1)) == (q, k), "queries do not come first"
    )
    both = flow.bound_instruction(number)
    state_update = flow.bound_instruction(last)
    saved = None if save is None else flow.bound_instruction(save)
    gates, old = match_gates(flow, rule), both.operand(0)
    products = match_products(flow, gates)
    require_supported(
        saved is None or (saved.op == "cont" and has_same_elements(saved.operand(0), old)), "a state is saved otherwise"
    )
    read = flow.bound_instruction(rule)
    inputs = DeltaRuleInputs(
        read.operand(0),
        read.operand(1),
        read.operand(2),
        flow.bound_instruction(gates.decay).out,
        flow.bound_instruction(gates.beta).out,
        state_update.out,
        None if saved is None else saved.out,
    )
    launches.number = last
    fault = launches.add_fault_message(f"id {{value}} names no row of its table, which has {both.out.shape[-2]}")
    launches.number = number
    matched = _MatchedConvolution(both, flow.bound_instruction(conv), state_update, gates)
    launch(launches, _collect_delta_net_sources(flow, matched, inputs, (silu, q, k), fault, products), inputs)
    chain = [
        number,
        last,
        conv,
        silu,
        q,
        k,
        *(getattr(gates, name) for name in DecayAndRateInstructions.__slots__),
        *(() if products is None else products.instruction_numbers),
        save,
    ]
    return [n for n in chain if n is not None]


@dataclass(frozen=True, slots=True)
class _MatchedConvolution:
    """The indices of the instructions of a short convolution and its state update that were found in a program.

    `both` joins old rows and new rows, `conv` is the convolution, `next_rows` selects the rows to keep.
    """

    both: BoundInstruction
    conv: BoundInstruction
    next_rows: BoundInstruction
    gates: DecayAndRateInstructions


def find_delta_rule_or_activation(flow: Dataflow, activation: int) -> int:
    """Return the index of the delta rule that reads an activation; without one, the index of the activation."""
    readers = flow.require_readers(activation)
    return next((n for n in readers if flow.bound_instruction(n).op == "gated_delta_net"), activation)


def _collect_delta_net_sources(
    flow: Dataflow,
    chain: _MatchedConvolution,
    inputs: DeltaRuleInputs,
    normed: tuple[int, int, int],
    fault: Sequence[LaunchWord],
    products: GateProducts | None,
) -> OperandsBeforeDeltaRule:
    """Collect the operands of the matched instructions before the delta rule, in the form that the fused kernel reads.

    Raises `NoKernelError` if an operand has a layout that kernels do not support.

    Args:
        flow: The dataflow of the program.
        chain: The matched instructions.
        inputs: The results.
        normed: The indices of the activation and of the norms of queries and keys.
        fault: The fault words for wrong row numbers.
        products: The matmuls that compute the logits of gates, if the kernel does so.
    """
    old, x, w, ids = chain.both.operand(0), chain.both.operand(1), chain.conv.operand(1), chain.next_rows.operand(1)
    require_supported(len(inputs.k.shape) == len(inputs.v.shape) == 4, "sequences lie along other axes")
    sequences, tokens, key_heads, size = inputs.k.shape
    value_heads, channels = inputs.v.shape[-2], x.shape[-1]
    shifted, rates, decay, logistic, beta = (
        flow.bound_instruction(getattr(chain.gates, n)) for n in ("shifted", "rates", "decay", "logistic", "beta")
    )
    valid, layer = decay.operand(1), DeltaNetWeights(w, rates.operand(1), shifted.operand(1))
    alpha, strength = (
        _as_gate_groups(
            (call if copy is None else flow.bound_instruction(copy)).operand(0), sequences, tokens, value_heads
        )
        for call, copy in ((shifted, chain.gates.dense_alpha), (logistic, chain.gates.dense_beta))
    )
    require_supported(alpha.shape == strength.shape, "gates are in different groups")
    require_supported(
        len(x.shape) == 3 and x.shape[:2] == (sequences, tokens) and w.shape == (channels, 4), "shapes differ"
    )
    require_supported(
        channels == (2 * key_heads + value_heads) * size and inputs.q.shape == inputs.k.shape, "heads differ in size"
    )
    require_supported(has_same_elements(valid, beta.operand(1)), "padding differs")
    require_gate_operands(flow, chain.gates, sequences * tokens, value_heads)
    require_supported(ids.dtype is DType.I32 and ids.shape == (sequences, 3), "rows are numbered otherwise")
    dense = [old, valid, layer.w, layer.a, layer.dt, inputs.q, inputs.k, inputs.g, inputs.beta, inputs.next_rows, ids]
    require_supported(
        all(o.is_dense for o in dense) and (inputs.saved_rows is None or inputs.saved_rows.is_dense),
        "operands are not dense",
    )
    require_supported(all(o.is_float for o in (*dense[:-1], x, alpha, strength, inputs.v)), "operands are not float32")
    require_supported(
        all(map(is_vector_aligned, (x, old, w, inputs.q, inputs.k, inputs.v, inputs.next_rows))),
        "operands are not aligned",
    )
    require_supported(inputs.v.strides[-2] == size, "heads are not dense")
    silu, q, k = map(flow.bound_instruction, normed)
    first = 0
    for part, heads in ((q.operand(0), key_heads), (k.operand(0), key_heads), (inputs.v, value_heads)):
        rows = silu.out.slice_axis(2, first * size, heads * size)
        strides = [find_strides_of_reshape(o.shape, o.strides, rows.shape) for o in (part, rows)]
        is_slice = part.address == rows.address and part.size == rows.size and strides[0] == strides[1]
        require_supported(is_slice, "heads lie otherwise")
        first += heads
    require_supported(not q.attrs["clamp"] and dict(q.attrs) == dict(k.attrs), "norms differ")
    others = [w, ids, valid, layer.a, layer.dt]
    if products is not None:
        others += [products.x, products.alpha, products.beta]
        require_supported(prod(products.x.shape[:-1]) == sequences * tokens, "logits are of other tokens")
        require_supported(products.alpha.shape[0] == value_heads, "logits are of other heads")
    _require_disjoint_results(inputs, tokens, x, old, others, alpha, strength)
    eps = float(attribute(q.attrs, "eps"))
    return OperandsBeforeDeltaRule(x, alpha, strength, valid, old, layer, eps, ids, fault, products)


def _require_disjoint_results(
    inputs: DeltaRuleInputs,
    tokens: int,
    x: Operand,
    old: Operand,
    others: Sequence[Operand],
    alpha: Operand,
    beta: Operand,
) -> None:
    """Raise `NoKernelError` if the kernel would overwrite an operand that another thread still reads.

    These overlaps are allowed: `next_rows` over old rows, gates over their own operands, and values over their inputs
    within `TOKENS_PER_THREAD` tokens.
    """
    rest = [*others, alpha, beta]
    require_no_alias(inputs.next_rows, [x, *rest], [old])
    for out in (inputs.q, inputs.k, *([] if inputs.saved_rows is None else [inputs.saved_rows])):
        require_no_alias(out, [x, old, *rest])
    size, heads = inputs.v.shape[-1], inputs.v.shape[-2]
    tail = x.slice_axis(2, x.shape[-1] - heads * size, heads * size)
    tensor = replace(tail.tensor, shape=inputs.v.shape, strides=(*x.strides[:2], size, 1))
    before = [x.slice_axis(2, 0, x.shape[-1] - heads * size), old, *rest]
    own = replace(tail, tensor=tensor)
    require_no_alias(inputs.v, before if tokens <= TOKENS_PER_THREAD else [x, *before], [own])
    require_no_alias(inputs.g, [x, old, *others, beta], [alpha])
    require_no_alias(inputs.beta, [x, old, *others, alpha], [beta])


def _as_gate_groups(x: Operand, sequences: int, tokens: int, heads: int) -> Operand:
    """Return a view of the gates `x` as [sequences, tokens, groups, heads of a group], so that kernels can read them.

    Contiguous gates are one group. Otherwise the heads of each group must be adjacent in memory.
    """
    if x.is_dense:
        return _reshape_dense(x, (sequences, tokens, 1, heads))
    shape = sequences, tokens, *x.shape[-2:]
    require_supported(
        len(x.shape) == 3 and x.tensor.spec.size == prod(shape) and prod(shape[2:]) == heads, "gates lie otherwise"
    )
    strides = x.strides[0] * tokens, *x.strides
    return replace(x, tensor=replace(x.tensor, shape=shape, strides=strides))


def _reshape_dense(x: Operand, shape: tuple[int, ...]) -> Operand:
    """Return a view of a contiguous operand with another shape; raise `NoKernelError` if it is not contiguous."""
    require_supported(x.is_dense and x.tensor.spec.size == prod(shape), "gates do not lie by token")
    return replace(x, tensor=replace(x.tensor, shape=shape, strides=contiguous_strides(shape)))


def _fuse_gated_rms_norm(launches: LaunchBuilder, flow: Dataflow, number: int) -> Sequence[int]:
    """Compute a gated RMS norm, ``rms_norm(x) * w * silu(z)``, in one launch."""
    factor = flow.require_sole_reader(number, "mul")
    gated = flow.require_sole_reader(factor, "mul")
    silu = flow.require_producer(gated, 1)
    require_supported(
        flow.bound_instruction(silu).op == "silu" and flow.require_sole_reader(silu, "mul", 1) == gated,
        "the gate is another",
    )
    x = flow.bound_instruction(number).operand(0)
    w = flow.bound_instruction(factor).operand(1)
    out = flow.bound_instruction(gated).out
    z = flow.bound_instruction(gated).operand(1)
    source = flow.bound_instruction(silu).operand(0)
    require_supported(source.is_dense and z.is_dense and len(x.shape) == 4, "gates do not lie by head")
    z = _reshape_dense(source, x.shape)
    require_supported(
        z.shape == x.shape == out.shape and w.tensor.spec.size == x.shape[-1], "the gate differs in shape"
    )
    require_supported(
        all(o.is_float and is_vector_aligned(o) for o in (x, z, out, w)) and w.is_dense, "rows are not aligned"
    )
    require_no_alias(out, [w], [x, z])
    launch_gated_rms_norm(launches, x, z, w, out, float(attribute(flow.bound_instruction(number).attrs, "eps")))
    return number, factor, silu, gated


FUSED: Mapping[str, Sequence[FusionBinder]] = MappingProxyType(
    {"concat": (_fuse_delta_net_inputs_and_logits, fuse_delta_net_inputs), "rms_norm": (_fuse_gated_rms_norm,)}
)
BINDINGS: Mapping[str, OpBinder] = MappingProxyType({"ssm_conv": _bind_ssm_conv})
SOURCES = (CONVOLUTION_SOURCE, INPUTS_SOURCE, NORM_SOURCE)
