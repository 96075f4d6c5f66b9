"""What surrounds the gated delta rule: the short convolution, alone or with activation, norms and gates, and the gated
norm of its output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

from ...operands import Bound, Operand
from ..driver import Source
from ..launches import Binding, Launches, blocks, need
from .elementwise import as_float
from .states import RECURRENT, rows

THREADS = 256
RUN = 16
"""Tokens that a thread takes one after the other."""
INPUT_SIZES = (16, 32, 64, 128)
NORM_SIZES = (*INPUT_SIZES, 256)

CONVOLUTION = Source("short_convolution.cu", ("short_convolution",), before=(RECURRENT,))
INPUTS = Source("short_convolution.cu", tuple(f"delta_inputs<{d}>" for d in INPUT_SIZES), before=(RECURRENT,))
NORMS = Source("short_convolution.cu", tuple(f"gated_norm<{d}>" for d in NORM_SIZES), before=(RECURRENT,))


def _with_heads(x: Operand) -> Operand:
    """x [..., rows, channels] as rows of one head."""
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
    """What the delta rule reads, dense: q, k [B, T, key heads, size], v [B, T, value heads, size], log decays and
    learning rates [B, T, value heads]; and the last three rows of the convolution [B, 3, channels]."""

    q: Operand
    k: Operand
    v: Operand
    g: Operand
    beta: Operand
    kept: Operand


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of a layer, dense: the convolution [channels, 4], -exp(A_log) and the bias of the steps [value heads]."""

    w: Operand
    a: Operand
    dt: Operand


def launch_inputs(
    launches: Launches, x: Operand, alpha: Operand, beta: Operand, valid: Operand | None, old: Operand, layer: Layer,
    made: Made, eps: float,
) -> None:  # fmt: skip
    """The convolution of x [B, T, channels] with SiLU, norms of keys and queries, and gates, as
    ``frontends/models/delta.py`` spells them out.  `old` [B, 3, channels] may be what `made` keeps.  `alpha`, `beta`
    [B, T, value heads] are what linear layers give; `valid` [B, T] is 0 for padding."""
    size = made.k.shape[-1]
    need(size in INPUT_SIZES and made.v.shape[-1] == size, f"heads of {size} are not convolved together")
    sequences, tokens, key_heads, _ = made.k.shape
    value_heads = made.v.shape[-2]
    heads_of_block = THREADS * 4 // size
    words = [*rows(_with_heads(x)), *rows(alpha, 2), *rows(beta, 2), layer.w, 0 if valid is None else valid]
    words += [layer.a, layer.dt, old, made.kept, made.q, made.k, made.v, made.g, made.beta]
    words += [tokens, key_heads, value_heads, eps]
    grid = blocks(tokens, RUN), blocks(2 * key_heads + value_heads, heads_of_block) + 1, sequences
    launches.add(INPUTS[f"delta_inputs<{size}>"], grid, THREADS, words)


def launch_gated_norm(launches: Launches, x: Operand, z: Operand, w: Operand, out: Operand, eps: float) -> None:
    """``rms_norm(x) w silu(z)`` over the last axis of [..., T, heads, size]."""
    *leading, tokens, heads, size = x.shape
    need(size in NORM_SIZES, f"heads of {size} have no gated norm")
    sequences = prod(leading)
    lanes = min(size // 4, 32)
    words = [*rows(x), *rows(z), *rows(out), w, sequences, tokens, heads, eps]
    grid = blocks(sequences * tokens * heads, THREADS // lanes)
    launches.add(NORMS[f"gated_norm<{size}>"], grid, THREADS, words)


BINDINGS: Mapping[str, Binding] = MappingProxyType({"ssm_conv": _ssm_conv})
SOURCES = (CONVOLUTION, INPUTS, NORMS)
