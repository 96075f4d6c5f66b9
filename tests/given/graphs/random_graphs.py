"""Random legal graphs over the registry of ops, from a seed or from hypothesis, with bindings that fit them.

`seeded_graph(7)` is always the same graph; `graphs()` is a hypothesis strategy that shrinks; `bindings(graph, rng)`
gives every leaf an array that its readers accept.  Sizes include 0, 1, primes and a quantisation block; values are
shared, viewed, and returned under several names; states have updates; optional operands come and go.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from hypothesis import strategies as st

from hocket import ops
from hocket.graph import DType, Graph, Value, constant, input, state, weight

Pick = Callable[[int, int], int]
"""A number from low to high, both included."""

SIZES = (0, 1, 2, 3, 5, 7, 13, 32)
LARGEST = 4096
"""The size limit of a value in elements; larger ones are not built, so that references stay fast."""

PLAIN_NAMES = ("up", "norm", "blk.0.attn_q", "out", "up")
HOSTILE_NAMES = (
    *('say "hi"', "two\nlines", "tab\there", "back\\slash", "übermäßig 中文 🎵", "\u2028", "\x00", "\ud800", " ", "'"),
    *("0", "1", "00", "-1", "1e5", "٣", "inf", "nan", "none", "true", "_", "return", "update", "f32", 'x"00"'),
    *("up~2", "up~2~2", "up#1", '"up"#1', "#1", "%up", "a=b", "(", "])", "//", "mul_mat", "-", ".", "~", "a/b"),
)


class Builder:
    """The values made so far, and the choices that lead on from them."""

    def __init__(self, pick: Pick, names: Sequence[str]) -> None:
        self.pick, self.names = pick, names
        self.values: list[Value] = []
        self.updates: dict[Value, Value] = {}
        self.taken: set[str] = set()

    def choose(self, options: Sequence[object]) -> object:
        return options[self.pick(0, len(options) - 1)]

    def size(self) -> int:
        return SIZES[self.pick(0, len(SIZES) - 1)]

    def shape(self, low: int = 0, high: int = 4) -> tuple[int, ...]:
        """Sizes of a rank from `low` to `high` that hold at most `LARGEST` elements."""
        shape = tuple(self.size() for _ in range(self.pick(low, high)))
        while math.prod(n or 1 for n in shape) > LARGEST:
            shape = (*shape[: shape.index(max(shape))], 2, *shape[shape.index(max(shape)) + 1 :])
        return shape

    def name(self) -> str:
        """A name for an inner node: often none, sometimes one that is taken."""
        return "" if self.pick(0, 1) else self.names[self.pick(0, len(self.names) - 1)]

    def key(self) -> str:
        """A name for a leaf, used once."""
        base_name = self.name() or "leaf"
        name = base_name
        while name in self.taken:
            name = f"{base_name}.{len(self.taken)}"
        self.taken.add(name)
        return name

    def leaf(self, shape: Sequence[int], dtypes: Sequence[str] = ("f32", "f16", "bf16")) -> Value:
        """Return a new input, weight, state or constant of one of `dtypes`."""
        kind, dtype = self.pick(0, 7), str(self.choose(dtypes))
        if kind == 0 and dtype in ("f32", "f16"):
            values = np.linspace(-1.0, 1.0, math.prod(shape)).reshape(shape)
            return constant(self.key(), values.astype(DType[dtype.upper()].storage))
        if dtype in ("f32", "f16", "bf16", "i32", "i64") and kind < 6:
            return (state if kind == 1 else input)(self.key(), shape, dtype)
        return weight(self.key(), shape, dtype)

    def weight(self, shape: Sequence[int]) -> Value:
        """A weight, quantised where its rows are whole blocks."""
        quantised = ("q8_0", "q4_0") if shape[-1] % 32 == 0 else ()
        return weight(self.key(), shape, str(self.choose(("f32", "f16", *quantised))))

    def value(self, fits: Callable[[Value], bool] = lambda v: True, low: int = 0) -> Value:
        """A float value made before that fits, else a new leaf of rank at least `low`."""
        fitting = [v for v in self.values if v.dtype.is_float and len(v.shape) >= low and fits(v)]
        if fitting and self.pick(0, 7):
            return fitting[self.pick(0, len(fitting) - 1)]
        return self.leaf(self.shape(low), ("f32",))

    def like(self, shape: tuple[int, ...]) -> Value:
        """A float value of this very shape."""
        same_shape = [v for v in self.values if v.dtype.is_float and v.shape == shape]
        return same_shape[self.pick(0, len(same_shape) - 1)] if same_shape and self.pick(0, 3) else self.leaf(shape)

    def keep(self, *values: Value) -> None:
        self.values += [v for v in values if v.spec.size <= LARGEST]


# ---------------------------------------------------------------------------------------------------------- steps


UNARY = (ops.neg, ops.silu, ops.sigmoid, ops.softplus, ops.tanh, ops.relu, ops.gelu, ops.cont)


def unary(b: Builder) -> None:
    b.keep(UNARY[b.pick(0, len(UNARY) - 1)](b.value(), name=b.name()))


def add_scale(b: Builder) -> None:
    bias = {"bias": 0.5} if b.pick(0, 1) else {}
    b.keep(ops.scale(b.value(), scale=(-0.5, 2.0, 1.0)[b.pick(0, 2)], name=b.name(), **bias))


def cast(b: Builder) -> None:
    b.keep(ops.cast(b.value(), dtype=(DType.F32, DType.F16, DType.BF16)[b.pick(0, 2)], name=b.name()))


def binary(b: Builder) -> None:
    """Two operands: of one shape, twice the same value, or the second one tiled into the first."""
    a = b.value()
    shape = tuple(n if b.pick(0, 1) else 1 for n in a.shape)
    other = (lambda: b.like(a.shape), lambda: a, lambda: b.leaf(shape[b.pick(0, len(shape)) :]))[b.pick(0, 2)]()
    b.keep((ops.add, ops.sub, ops.mul)[b.pick(0, 2)](a, other, name=b.name()))


def add_norm(b: Builder) -> None:
    make = (ops.rms_norm, ops.l2_norm)[b.pick(0, 1)]
    b.keep(make(b.value(low=1), eps=(1e-6, 1e-3)[b.pick(0, 1)], name=b.name()))


def add_gated_product(b: Builder) -> None:
    gate = b.value()
    b.keep(ops.swiglu(gate, b.like(gate.shape), name=b.name()))


def product(b: Builder) -> None:
    x = b.value(low=2)
    b.keep(ops.mul_mat(b.weight((b.size(), x.shape[-1])), x, name=b.name()))


def softmax(b: Builder) -> None:
    x = b.value(low=3)
    h, t, s = x.shape[-3:]
    mask = b.leaf((t, s)) if b.pick(0, 1) else None
    b.keep(ops.softmax(x, mask, b.leaf((h,), ("f32",)) if b.pick(0, 1) else None, scale=0.5, name=b.name()))


def add_reshape(b: Builder) -> None:
    """Split one axis, or merge two neighbours, or flatten."""
    x = b.value(low=1)
    axis = b.pick(0, len(x.shape) - 1)
    n, before, after = x.shape[axis], x.shape[:axis], x.shape[axis + 1 :]
    factors = [f for f in range(1, n + 1) if n % f == 0]
    shape: tuple[int, ...] = (x.spec.size,)
    if b.pick(0, 2) == 0 and factors and len(x.shape) < 5:
        f = factors[b.pick(0, len(factors) - 1)]
        shape = (*before, f, n // f, *after)
    elif after and b.pick(0, 1):
        shape = (*before, n * after[0], *after[1:])
    b.keep(ops.reshape(x, shape=shape, name=b.name()))


def add_permutation(b: Builder) -> None:
    x = b.value()
    left, axes = list(range(len(x.shape))), []
    while left:
        axes.append(left.pop(b.pick(0, len(left) - 1)))
    b.keep(ops.permute(x, axes=tuple(axes), name=b.name()))


def add_transpose(b: Builder) -> None:
    b.keep(ops.transpose(b.value(low=2), name=b.name()))


def add_slice(b: Builder) -> None:
    x = b.value(low=1)
    axis = b.pick(-len(x.shape), len(x.shape) - 1)
    start = b.pick(0, x.shape[axis])
    b.keep(ops.slice_(x, axis=axis, start=start, stop=b.pick(start, x.shape[axis]), name=b.name()))


def broadcast(b: Builder) -> None:
    x = b.value(lambda v: len(v.shape) < 5)
    shape = tuple(n if n != 1 else (1, 2, 3)[b.pick(0, 2)] for n in x.shape)
    b.keep(ops.broadcast(x, shape=(2,) * b.pick(0, 1) + shape, name=b.name()))


def add_concat(b: Builder) -> None:
    x = b.value(low=1)
    axis = b.pick(0, len(x.shape) - 1)
    other = b.leaf((*x.shape[:axis], b.size(), *x.shape[axis + 1 :]), (str(x.dtype),))
    pair = (x, x if b.pick(0, 2) == 0 else other)
    b.keep(ops.concat(*(pair if b.pick(0, 1) else pair[::-1]), axis=axis, name=b.name()))


def add_row_gather(b: Builder) -> None:
    rows = b.pick(1, 13)
    ids = b.leaf((b.pick(0, 5),), ("i32", "i64"))
    b.keep(ops.get_rows(b.weight((rows, b.size())), ids, name=b.name()))


def add_cache(b: Builder) -> None:
    """Rows set in a state, which is read before and after."""
    x = b.value(lambda v: len(v.shape) == 2 and v.shape[0] <= 13, low=2)
    if len(x.shape) != 2:
        return
    cache = state(b.key(), (x.shape[0] + b.pick(0, 3), x.shape[1]), ("f32", "f16")[b.pick(0, 1)])
    new = ops.set_rows(cache, x, b.leaf((x.shape[0],), ("i32", "i64")), name=b.name())
    b.updates[cache] = new
    b.keep(cache, new)


def add_rope(b: Builder) -> None:
    t, h, half = b.pick(0, 5), b.pick(1, 3), b.pick(1, 4)
    x = b.like((t, h, 2 * half))
    factors = weight(b.key(), (half,)) if b.pick(0, 1) else None
    pos = b.leaf((t,), ("i32",))
    b.keep(ops.rope(x, pos, factors, n_dims=2 * half, mode=("normal", "neox")[b.pick(0, 1)], name=b.name()))


def add_attention(b: Builder) -> None:
    """Attention with every choice of its two optional operands."""
    t, s, h, g, d, e = b.pick(0, 3), b.size(), b.pick(1, 3), b.pick(1, 3), b.size(), b.size()
    q, k, v = b.like((t, h * g, d)), b.leaf((s, h, d)), b.leaf((s, h, e))
    mask = b.leaf((t, s), ("f32", "f16")) if b.pick(0, 1) else None
    sinks = b.leaf((h * g,), ("f32",)) if b.pick(0, 1) else None
    b.keep(ops.attention(q, k, v, mask, sinks, scale=0.25, name=b.name()))


def add_mask(b: Builder) -> None:
    pos = b.leaf((b.pick(0, 5),), ("i32",))
    seen = ops.causal_mask(pos, cells=b.pick(0, 9), window=b.pick(0, 3), name=b.name())
    h = b.pick(1, 3)
    b.keep(ops.softmax(b.leaf((h, *seen.shape)), seen, name=b.name()))


def add_convolution(b: Builder) -> None:
    x = b.value(lambda v: len(v.shape) >= 2 and v.shape[-2] >= 1, low=2)
    taps = b.pick(1, max(1, min(4, x.shape[-2])))
    if x.shape[-2] >= taps:
        b.keep(ops.ssm_conv(x, b.leaf((x.shape[-1], taps)), name=b.name()))


def recurrent(b: Builder) -> None:
    """Add a node with two results; one is the new value of a state."""
    t, h, r, d, e = b.pick(0, 3), b.pick(1, 3), b.pick(1, 3), b.pick(1, 5), b.pick(1, 5)
    q, k, v = b.like((t, h, d)), b.leaf((t, h, d)), b.leaf((t, h * r, e))
    g, beta = b.leaf((t, h * r, (1, d)[b.pick(0, 1)]), ("f32",)), b.leaf((t, h * r), ("f32",))
    old = state(b.key(), (h * r, e, d))
    heads = ("tiled", "interleaved")[b.pick(0, 1)]
    out, new = ops.gated_delta_net(ops.l2_norm(q), ops.l2_norm(k), v, g, beta, old, heads=heads, name=b.name())
    if b.pick(0, 3):
        b.updates[old] = new
    b.keep(out, *([new] if b.pick(0, 1) else []))


VIEWS = (add_reshape, add_permutation, add_transpose, add_slice, broadcast)
STEPS = (
    *(
        unary,
        add_scale,
        cast,
        binary,
        binary,
        add_norm,
        add_gated_product,
        product,
        product,
        softmax,
        add_concat,
        add_row_gather,
        add_cache,
    ),
    *(add_rope, add_attention, add_mask, add_convolution, recurrent, *VIEWS),
)


# --------------------------------------------------------------------------------------------------------- graphs


def random_graph(pick: Pick, steps: int = 12, names: Sequence[str] = PLAIN_NAMES) -> Graph:
    """A legal graph of about `steps` operations, every choice made by `pick`."""
    b = Builder(pick, names)
    while len(b.values) < 1:
        b.keep(b.leaf(b.shape(), ("f32",)))
    for _ in range(steps):
        STEPS[pick(0, len(STEPS) - 1)](b)
    inner = [v for v in b.values if not v.node.is_leaf] or b.values
    outputs: dict[str, Value] = {}
    for i in range(pick(1, 4)):
        name = b.name() or f"out{i}"
        outputs[name] = inner[-1] if i == 0 else inner[pick(0, len(inner) - 1)]
    return Graph(outputs, b.updates)


def seeded_graph(seed: int, steps: int = 12, names: Sequence[str] = PLAIN_NAMES) -> Graph:
    """The graph of a seed, the same in every process."""
    return random_graph(random.Random(seed).randint, steps, names)


@st.composite
def graphs(draw: st.DrawFn, steps: int = 8, names: Sequence[str] = PLAIN_NAMES) -> Graph:
    """Graphs of at most `steps` operations, which hypothesis can shrink."""

    def pick(low: int, high: int) -> int:
        return draw(st.integers(low, high))

    return random_graph(pick, pick(0, steps), names)


def bindings(graph: Graph, rng: np.random.Generator) -> Mapping[str, np.ndarray]:
    """An array for each input, weight and state that lies in the range its readers declare."""
    users = graph.users()
    arrays = {}
    for leaf in (*graph.inputs, *graph.weights, *graph.states):
        ranges = [
            (node, declared.ranges[name])
            for node in users[leaf]
            for declared in (ops.op_of(node),)
            for name, source in zip(declared.operand_names, node.src, strict=False)
            if source == leaf and name in declared.ranges
        ]
        if leaf.dtype.is_integer:
            arrays[leaf.node.name] = _integers(leaf, ranges, rng)
        else:
            low = max([r.low for _, r in ranges], default=-1.0)
            high = min([float(r.high) for _, r in ranges], default=1.0)
            arrays[leaf.node.name] = rng.uniform(low, high, leaf.shape)
    return arrays


def _integers(leaf: Value, ranges: Sequence[tuple[object, ops.Range]], rng: np.random.Generator) -> np.ndarray:
    """Integers below every bound; each row without repetition where a reader asks for that."""
    stop = 100
    for node, legal in ranges:
        sizes = ops.op_of(node).resolve_sizes([None if s is None else s.spec for s in node.src], node.attrs).by_name
        stop = min(stop, sizes[legal.high] if isinstance(legal.high, str) else int(legal.high) + 1)
    if any(legal.distinct for _, legal in ranges):
        rows = [rng.permutation(stop)[: leaf.shape[-1]] for _ in range(math.prod(leaf.shape[:-1]))]
        return np.array(rows, np.int64).reshape(leaf.shape)
    return rng.integers(0, max(stop, 1), leaf.shape)
