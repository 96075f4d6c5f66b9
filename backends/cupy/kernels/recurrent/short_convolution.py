"""Kernels around the delta rule: short convolution with activation, norms and gates, and the gated output norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType

from .....graph.dtypes import DType
from .....ops.declaration.attributes import float_attribute as attribute
from ....base import contiguous_strides
from ....chains import short_convolution
from ....flow import Flow, apart, lies_as
from ....operands import Bound, Operand, need
from ...binding.chains import Fused
from ...binding.launches import Binding, Launches, Word, blocks
from ...device.driver import Source
from ..elementwise import as_float
from .states import RECURRENT, has_quads, rows

THREADS = 256
RUN = 16
"""Tokens that a thread processes one after the other."""
INPUT_SIZES = (16, 32, 64, 128)
NORM_SIZES = (*INPUT_SIZES, 256)

CONVOLUTION = Source("short_convolution.cu", ("short_convolution",), before=(RECURRENT,))
INPUTS = Source("short_convolution.cu", tuple(f"delta_inputs<{d}>" for d in INPUT_SIZES), before=(RECURRENT,))
NORMS = Source("short_convolution.cu", tuple(f"gated_norm<{d}>" for d in NORM_SIZES), before=(RECURRENT,))


def _with_heads(x: Operand) -> Operand:
    """Return x [..., rows, channels] as rows of one head."""
    t = x.tensor
    shape, strides = (*t.shape[:-1], 1, t.shape[-1]), (*t.strides[:-1], 0, t.strides[-1])
    return Operand(x.address, type(t)(t.buffer, t.offset, shape, strides, t.dtype), x.declared, x.stored)


def _ssm_conv(launches: Launches, call: Bound) -> None:
    x, w, out = as_float(launches, call.operand(0)), as_float(launches, call.operand(1)), call.out
    *leading, tokens, channels = out.shape
    words = [*rows(_with_heads(x)), *rows(_with_heads(out)), w, *w.strides, tokens, channels, w.shape[-1]]
    grid = blocks(channels, THREADS), blocks(tokens, RUN), prod(leading)
    launches.add(CONVOLUTION["short_convolution"], grid, THREADS, words)


@dataclass(frozen=True, slots=True)
class Made:
    """The operands of the delta rule, which one kernel computes.

    `q`, `k`: [B, T, key heads, size]. `v`: [B, T, value heads, size]. `g`, `beta`: log decays and learning rates [B, T,
    value heads]. `next_rows`: the last rows of the convolution [B, 3, channels]. `saved_rows`: their old values, if
    they are needed. All are contiguous except `v`, where only each token's heads are.
    """

    q: Operand
    k: Operand
    v: Operand
    g: Operand
    beta: Operand
    kept: Operand
    saved: Operand | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """The contiguous weights of a layer.

    `w`: the convolution [channels, 4]. `a`: -exp(A_log) [value heads]. `dt`: the bias of the steps [value heads].
    """

    w: Operand
    a: Operand
    dt: Operand


def launch_inputs(
    launches: Launches,
    x: Operand,
    alpha: Operand,
    beta: Operand,
    valid: Operand | None,
    old: Operand,
    layer: Layer,
    made: Made,
    eps: float,
    ids: Operand | None = None,
    fault: Sequence[Word] = (0, 0),
) -> None:
    """Launch the convolution with SiLU, norms of queries and keys, and gates.

    ``frontends/models/layers/delta.py`` has the decomposition.

    Args:
        launches: Receives the launch.
        x: Input of the convolution [B, T, channels].
        alpha: Decay logits from a linear layer [B, T, groups, value heads of a group].
        beta: Learning-rate logits, with the shape of `alpha`.
        valid: 0 for padding tokens [B, T].
        old: Rows before the first token [B, 3, channels]. They may be the memory of `next_rows`.
        layer: The weights.
        made: The results.
        eps: Epsilon of the norms.
        ids: Numbers of the rows to keep [B, 3], where 0 is the first of `old`. Without them the last rows are kept.
        fault: The fault words for wrong numbers.
    """
    size = made.k.shape[-1]
    need(size in INPUT_SIZES and made.v.shape[-1] == size, f"heads of {size} are not convolved together")
    sequences, tokens, key_heads, _ = made.k.shape
    value_heads = made.v.shape[-2]
    heads_of_block = THREADS * 4 // size
    words = [*rows(_with_heads(x)), *rows(alpha), *rows(beta), alpha.shape[-1], layer.w, 0 if valid is None else valid]
    words += [layer.a, layer.dt, old, ids or 0, made.kept, made.saved or 0, made.q, made.k, made.g, made.beta]
    words += [*rows(made.v), *fault, tokens, key_heads, value_heads, eps]
    grid = blocks(tokens, RUN), blocks(2 * key_heads + value_heads, heads_of_block) + 1, sequences
    launches.add(INPUTS[f"delta_inputs<{size}>"], grid, THREADS, words)


def launch_gated_norm(launches: Launches, x: Operand, z: Operand, w: Operand, out: Operand, eps: float) -> None:
    """Launch ``rms_norm(x) * w * silu(z)`` over the last axis.

    Args:
        launches: Receives the launch.
        x: The operand of the norm [..., T, heads, size].
        z: The gate, with the shape of x.
        w: The factors of the norm [size].
        out: The result, with the shape of x.
        eps: Epsilon of the norm.
    """
    *leading, tokens, heads, size = x.shape
    need(size in NORM_SIZES, f"heads of {size} have no gated norm")
    sequences = prod(leading)
    lanes = min(size // 4, 32)
    words = [*rows(x), *rows(z), *rows(out), w, sequences, tokens, heads, eps]
    grid = blocks(sequences * tokens * heads, THREADS // lanes)
    launches.add(NORMS[f"gated_norm<{size}>"], grid, THREADS, words)


# --------------------------------------------------------------------------------------------------------- fusions


@dataclass(frozen=True, slots=True)
class _Gates:
    """The instructions that compute log decays and learning rates."""

    shifted: int
    steps: int
    rates: int
    decay: int
    logistic: int
    beta: int
    dense_alpha: int | None
    dense_beta: int | None


def _gates(flow: Flow, rule: int) -> _Gates:
    decay, beta = flow.maker(rule, 3), flow.maker(rule, 4)
    rates, logistic = flow.maker(decay, 0), flow.maker(beta, 0)
    steps = flow.maker(rates, 0)
    shifted = flow.maker(steps, 0)
    gates = _Gates(shifted, steps, rates, decay, logistic, beta, *(_dense_copy(flow, n) for n in (shifted, logistic)))
    need(flow.reader(gates.shifted, "softplus") == steps, "the steps are made otherwise")
    need(flow.reader(steps, "mul") == rates and flow.reader(rates, "mul") == decay, "decays are made otherwise")
    need(flow.reader(logistic, "mul") == beta, "learning rates are made otherwise")
    need(flow.call(gates.shifted).op == "add" and flow.call(logistic).op == "sigmoid", "gates are made otherwise")
    return gates


def _dense_copy(flow: Flow, reader: int) -> int | None:
    """Find the instruction that copies an operand to contiguous memory for this reader alone."""
    maker = flow.maker(reader, 0)
    return maker if flow.call(maker).op == "cont" and flow.found(maker) == [reader] else None


def _delta_inputs(launches: Launches, flow: Flow, number: int) -> Sequence[int]:
    """Fuse all instructions between the linear layers and the delta rule, except the rule."""
    _, conv, silu, (q, k), last, save = short_convolution(flow, number)
    rule = next((n for n in flow.readers_of(silu) if flow.call(n).op == "gated_delta_net"), silu)
    need({*flow.readers_of(silu)} == {q, k, rule}, "the convolution is read otherwise")
    need((flow.maker(rule, 0), flow.maker(rule, 1)) == (q, k), "queries do not come first")
    both, kept, saved = flow.call(number), flow.call(last), None if save is None else flow.call(save)
    gates, old = _gates(flow, rule), both.operand(0)
    need(saved is None or (saved.op == "cont" and lies_as(saved.operand(0), old)), "a state is saved otherwise")
    read = flow.call(rule)
    made = Made(
        read.operand(0),
        read.operand(1),
        read.operand(2),
        flow.call(gates.decay).out,
        flow.call(gates.beta).out,
        kept.out,
        None if saved is None else saved.out,
    )
    launches.number = last
    fault = launches.fault(f"id {{value}} names no row of its table, which has {both.out.shape[-2]}")
    launches.number = number
    _launch_chain(launches, flow, _Chain(both, flow.call(conv), kept, gates), made, (silu, q, k), fault)
    chain = [number, last, conv, silu, q, k, *(getattr(gates, name) for name in _Gates.__slots__), save]
    return [n for n in chain if n is not None]


@dataclass(frozen=True, slots=True)
class _Chain:
    """The instructions with operands that the kernel reads."""

    both: Bound
    conv: Bound
    kept: Bound
    gates: _Gates


def _launch_chain(
    launches: Launches, flow: Flow, chain: _Chain, made: Made, normed: tuple[int, int, int], fault: Sequence[Word]
) -> None:
    """Launch the fused kernel if all operands have the required layout."""
    old, x, w, ids = chain.both.operand(0), chain.both.operand(1), chain.conv.operand(1), chain.kept.operand(1)
    sequences, tokens, key_heads, size = made.k.shape
    value_heads, channels = made.v.shape[-2], x.shape[-1]
    shifted, rates, decay, logistic, beta = (
        flow.call(getattr(chain.gates, n)) for n in ("shifted", "rates", "decay", "logistic", "beta")
    )
    valid, layer = decay.operand(1), Layer(w, rates.operand(1), shifted.operand(1))
    alpha, strength = (
        _by_group((call if copy is None else flow.call(copy)).operand(0), sequences, tokens, value_heads)
        for call, copy in ((shifted, chain.gates.dense_alpha), (logistic, chain.gates.dense_beta))
    )
    need(alpha.shape == strength.shape, "gates are in different groups")
    need(len(x.shape) == 3 and x.shape[:2] == (sequences, tokens) and w.shape == (channels, 4), "shapes differ")
    need(channels == (2 * key_heads + value_heads) * size and made.q.shape == made.k.shape, "heads differ in size")
    need(lies_as(valid, beta.operand(1)) and valid.tensor.spec.size == sequences * tokens, "padding differs")
    need(layer.a.tensor.spec.size == layer.dt.tensor.spec.size == value_heads, "heads share rates")
    need(ids.dtype is DType.I32 and ids.shape == (sequences, 3), "rows are numbered otherwise")
    dense = [old, valid, layer.w, layer.a, layer.dt, made.q, made.k, made.g, made.beta, made.kept, ids]
    need(all(o.is_dense for o in dense) and (made.saved is None or made.saved.is_dense), "operands are not dense")
    need(all(o.is_float for o in (*dense[:-1], x, alpha, strength, made.v)), "operands are not float32")
    need(all(map(has_quads, (x, old, w, made.q, made.k, made.v, made.kept))), "operands are not aligned")
    need(made.v.strides[-2] == size, "heads are not dense")
    silu, q, k = map(flow.call, normed)
    parts = [q.operand(0), k.operand(0), made.v]
    places = [silu.out.address + 4 * n * size for n in (0, key_heads, 2 * key_heads)]
    need([p.address for p in parts] == places and silu.out.shape[-1] == channels, "heads lie otherwise")
    need(not q.attrs["clamp"] and dict(q.attrs) == dict(k.attrs), "norms differ")
    _need_apart(made, tokens, x, old, [w, ids, valid, layer.a, layer.dt], alpha, strength)
    eps = float(attribute(q.attrs, "eps"))
    launch_inputs(launches, x, alpha, strength, valid, old, layer, made, eps, ids, fault)


def _need_apart(
    made: Made, tokens: int, x: Operand, old: Operand, others: Sequence[Operand], alpha: Operand, beta: Operand
) -> None:
    """Require results that overlap no operand that other threads still read.

    A thread may write `next_rows` over old rows, values over their inputs within `TOKENS_PER_THREAD` tokens, and gates
    over their own operands.
    """
    rest = [*others, alpha, beta]
    apart(made.kept, [x, *rest], [old])
    for out in (made.q, made.k, *([] if made.saved is None else [made.saved])):
        apart(out, [x, old, *rest])
    size, heads = made.v.shape[-1], made.v.shape[-2]
    tail = x.part(2, x.shape[-1] - heads * size, heads * size)
    tensor = replace(tail.tensor, shape=made.v.shape, strides=(*x.strides[:2], size, 1))
    before = [x.part(2, 0, x.shape[-1] - heads * size), old, *rest]
    own = replace(tail, tensor=tensor)
    apart(made.v, before if tokens <= RUN else [x, *before], [own])
    apart(made.g, [x, old, *others, beta], [alpha])
    apart(made.beta, [x, old, *others, alpha], [beta])


def _by_group(x: Operand, sequences: int, tokens: int, heads: int) -> Operand:
    """Return gates as [sequences, tokens, groups, heads of a group], contiguous or with adjacent heads per group."""
    if x.is_dense:
        return _relaid(x, (sequences, tokens, 1, heads))
    shape = sequences, tokens, *x.shape[-2:]
    need(len(x.shape) == 3 and x.tensor.spec.size == prod(shape) and prod(shape[2:]) == heads, "gates lie otherwise")
    strides = x.strides[0] * tokens, *x.strides
    return replace(x, tensor=replace(x.tensor, shape=shape, strides=strides))


def _relaid(x: Operand, shape: tuple[int, ...]) -> Operand:
    """Return a contiguous operand with another shape."""
    need(x.is_dense and x.tensor.spec.size == prod(shape), "gates do not lie by token")
    return replace(x, tensor=replace(x.tensor, shape=shape, strides=contiguous_strides(shape)))


def _gated_norm(launches: Launches, flow: Flow, number: int) -> Sequence[int]:
    """Fuse ``rms_norm(x) * w * silu(z)``."""
    factor = flow.reader(number, "mul")
    gated = flow.reader(factor, "mul")
    silu = flow.maker(gated, 1)
    need(flow.call(silu).op == "silu" and flow.reader(silu, "mul", 1) == gated, "the gate is another")
    x, w, out = flow.call(number).operand(0), flow.call(factor).operand(1), flow.call(gated).out
    z = flow.call(gated).operand(1)
    source = flow.call(silu).operand(0)
    need(source.is_dense and z.is_dense and len(x.shape) == 4, "gates do not lie by head")
    z = _relaid(source, x.shape)
    need(z.shape == x.shape == out.shape and w.tensor.spec.size == x.shape[-1], "the gate differs in shape")
    need(all(o.is_float and has_quads(o) for o in (x, z, out, w)) and w.is_dense, "rows are not aligned")
    apart(out, [w], [x, z])
    launch_gated_norm(launches, x, z, w, out, float(attribute(flow.call(number).attrs, "eps")))
    return number, factor, silu, gated


FUSED: Mapping[str, Sequence[Fused]] = MappingProxyType({"concat": (_delta_inputs,), "rms_norm": (_gated_norm,)})
BINDINGS: Mapping[str, Binding] = MappingProxyType({"ssm_conv": _ssm_conv})
SOURCES = (CONVOLUTION, INPUTS, NORMS)
