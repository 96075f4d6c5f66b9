"""Graphs of a seed that test the planner.

They have every op of the registry on operands that are sharded, partial sums, sliced or shared, and network shapes
that use one factor twice.

`wide_graph(7)` is always the same graph. It begins with values that can be sharded, grows by steps, and every op
comes with the shapes of its own samples. There are few sizes, so that axes of different values match.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import pairwise

from hocket import ops
from hocket.graph import DType, Graph, GraphError, Value, constant, input, state, weight
from hocket.graph.parse import parse_case
from hocket.graph.spec import Spec
from hocket.ops import REGISTRY, Op
from hocket.ops.collectives import COLLECTIVES

from .random_graphs import STEPS as PLAIN_STEPS
from .random_graphs import Builder as PlainBuilder

SIZES = (1, 2, 3, 4, 4, 6, 6, 8)
LARGEST = 4096
OPS = tuple(name for name in sorted(REGISTRY) if name not in COLLECTIVES)
SAMPLES = {
    name: tuple(
        s
        for s in REGISTRY[name].samples
        if all(v.size <= LARGEST for v in parse_case(s).values() if isinstance(v, Spec))
    )
    for name in OPS
}
UNARY = (ops.neg, ops.silu, ops.sigmoid, ops.tanh, ops.gelu, ops.cont, ops.sqr)


class Builder(PlainBuilder):
    """The values made so far, and the ways to make more."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        super().__init__(self.random.randint, ("up", "norm", "out"))

    def leaf_weight(self, shape: tuple[int, ...]) -> Value:
        """A new weight, quantised where its rows are whole blocks."""
        blocks = shape[-1] and shape[-1] % 32 == 0
        return weight(self.key(), shape, self.random.choice(("f32", "f16", *(("q8_0", "q4_0") if blocks else ()))))

    def size(self) -> int:
        return 0 if self.random.random() < 0.01 else self.random.choice(SIZES)

    def floats(self, fits: Callable[[Value], bool] = lambda v: True) -> list[Value]:
        return [v for v in self.values if v.dtype.is_float and fits(v)]

    def any_value(self, low: int = 1) -> Value:
        """A value made before, or a new one."""
        known = self.floats(lambda v: len(v.shape) >= low)
        if known and self.random.random() < 0.85:
            return self.random.choice(known[-8:] if self.random.random() < 0.6 else known)
        return self.grow_value(tuple(self.size() for _ in range(self.random.randint(low, max(low, 3)))))

    def like(self, shape: tuple[int, ...]) -> Value:
        known = self.floats(lambda v: v.shape == shape)
        return self.random.choice(known) if known and self.random.random() < 0.6 else self.grow_value(shape)

    def grow_value(self, shape: tuple[int, ...]) -> Value:
        """Return a new float value of `shape`: a leaf, or a product with an axis to shard or a partial sum."""
        how = self.random.randrange(7)
        if how == 0 or not shape:
            return input(self.key(), shape)
        if how == 1:
            return weight(self.key(), shape, self.random.choice(("f32", "f16")))
        if how == 2 and self.random.random() < 0.5:
            return state(self.key(), shape)
        if how == 3 and len(shape) >= 2:  # cut along an outer axis
            other = self.grow_value((*shape[:-2], shape[-1], shape[-2]))
            return ops.cont(ops.transpose(other)) if self.random.random() < 0.7 else ops.transpose(other)
        k = self.size() or 4
        rows = shape[:-1] if len(shape) > 1 else (1,)
        x = self.like((*rows, k)) if self.random.random() < 0.3 else input(self.key(), (*rows, k))
        if self.random.random() < 0.4:  # its contraction is cut as well
            x = ops.silu(ops.mul_mat(weight(self.key(), (k, 4)), input(self.key(), (*rows, 4))))
        new_value = ops.mul_mat(weight(self.key(), (shape[-1], k)), x)
        return new_value if new_value.shape == shape else ops.reshape(new_value, shape=shape)

    def keep(self, *values: Value) -> None:
        self.values += [v for v in values if v.spec.size <= LARGEST]


# --------------------------------------------------------------------------------------------------------- steps


def product(b: Builder) -> None:
    """With a weight, with another value, or with itself."""
    x = b.any_value(2)
    n, k = x.shape[-2:]
    how = b.random.randrange(6)
    if how == 0:
        y = ops.mul_mat(x, x)
    elif how == 1:
        y = ops.mul_mat(ops.cont(ops.transpose(x)), ops.cont(ops.transpose(x)))
    elif how == 2:
        y = ops.mul_mat(x, b.like((*x.shape[:-2], b.size(), k)))
    elif how == 3:
        y = ops.mul_mat(b.like((b.size(), n)), ops.cont(ops.transpose(x)))
    else:
        weights = [v for v in b.values if v.node.op == "weight" and len(v.shape) == 2 and v.shape[-1] == k]
        shared = bool(weights) and b.random.random() < 0.4
        y = ops.mul_mat(b.random.choice(weights) if shared else b.leaf_weight((b.size(), k)), x)
    b.keep(y)


def symmetric(b: Builder) -> None:
    """A matrix and its transpose, added, multiplied or laid side by side."""
    n = b.size()
    w = b.like((n, n))
    transposed = ops.cont(ops.transpose(w)) if b.random.random() < 0.7 else ops.transpose(w)
    how = b.random.randrange(4)
    if how < 2:
        y = (ops.add, ops.mul)[how](w, transposed)
    elif how == 2:
        y = ops.concat(w, transposed, axis=b.random.randrange(2))
    else:
        y = ops.mul_mat(w, transposed)
    b.keep(w, y)


def add_split_and_join(b: Builder) -> None:
    """An axis in pieces, which come together again in this or another order, or go their own ways."""
    x = b.any_value()
    axis = b.random.randrange(len(x.shape))
    n = x.shape[axis]
    ends = sorted({0, n, *(b.random.randint(0, n) for _ in range(b.random.randint(1, 3)))})
    parts = [ops.slice_(x, axis=axis, start=s, stop=e) for s, e in pairwise(ends)]
    if not parts:
        return
    if b.random.random() < 0.6:
        if b.random.random() < 0.5:
            b.random.shuffle(parts)
        joined = parts[0]
        for part in parts[1:]:
            joined = ops.concat(joined, part, axis=axis)
        b.keep(joined)
    else:
        b.keep(*parts)


def slice_of_a_weight(b: Builder) -> None:
    """Add the product of a slice of a weight, and the product of the whole."""
    x = b.any_value(2)
    w = b.leaf_weight((b.size() + 1, x.shape[-1]))
    start = b.random.randint(0, w.shape[0])
    part = ops.slice_(w, axis=0, start=start, stop=b.random.randint(start, w.shape[0]))
    b.keep(ops.mul_mat(part, x), ops.mul_mat(w, x))


def seen_otherwise(b: Builder) -> None:
    """One weight under several shapes, each in a product."""
    n, k, f = (b.size() or 1 for _ in range(3))
    w = b.leaf_weight((n * f, k))
    b.keep(w)
    for shape in ((n, f * k), (f, n * k), (n * f, k)):
        if b.random.random() < 0.7:
            m = b.size()
            b.keep(ops.mul_mat(ops.reshape(w, shape=shape), b.like((m, shape[1]))))
    if b.random.random() < 0.5:
        b.keep(ops.mul_mat(ops.cont(ops.transpose(w)), b.like((b.size(), n * f))))


def add_reshape(b: Builder) -> None:
    """A reshape that splits, merges or both."""
    x = b.any_value()
    sizes = [n for n in x.shape if n != 1] or [1]
    flat = math.prod(sizes)
    shape, left = [], flat
    while left > 1 and len(shape) < 3:
        f = b.random.choice([d for d in range(1, left + 1) if left % d == 0])
        shape.append(f)
        left //= f
    y = ops.reshape(x, shape=(*shape, left) if flat else x.shape)
    b.keep(y)
    if b.random.random() < 0.3 and len(y.shape) >= 2:
        b.keep(ops.reshape(ops.transpose(y), shape=(flat,)) if b.random.random() < 0.5 else ops.cont(ops.transpose(y)))


def add_partial_write(b: Builder) -> None:
    """`set` and `acc` of one value into another: cut into owed, owed into cut, and all others."""
    a = b.any_value()
    shape = tuple(b.random.randint(0 if n == 0 else 1, n) for n in a.shape)
    at = tuple(b.random.randint(0, n - m) for n, m in zip(a.shape, shape, strict=True))
    b.keep((ops.set_, ops.acc)[b.random.randrange(2)](a, b.like(shape), offsets=at))


def binary(b: Builder) -> None:
    a = b.any_value()
    tiles = tuple(b.random.choice([d for d in range(1, n + 1) if n % d == 0] or [n]) for n in a.shape)
    how = b.random.randrange(4)
    other = a if how == 0 else b.like(a.shape) if how == 1 else b.like(tiles[b.random.randint(0, len(tiles)) :])
    b.keep((ops.add, ops.sub, ops.mul)[b.random.randrange(3)](a, other))


def unary(b: Builder) -> None:
    b.keep(b.random.choice(UNARY)(b.any_value()))


def add_reduction(b: Builder) -> None:
    x = b.any_value()
    how = b.random.randrange(6)
    if how == 0:
        b.keep(ops.sum_rows(x))
    elif how == 1:
        b.keep(ops.mean(x))
    elif how == 2:
        b.keep(ops.cumsum(x))
    elif how == 3:
        b.keep(ops.rms_norm(x))
    elif how == 4:
        b.keep(ops.sum_(x))
    else:
        b.keep(ops.softmax(ops.reshape(x, shape=(1,) * (3 - len(x.shape)) + x.shape), scale=0.5))


def looked_up(b: Builder) -> None:
    """Rows by numbers that are computed: a sort, or the largest of them."""
    n, d = b.size() or 2, b.size()
    order = b.like((n,)) if b.random.random() < 0.5 else b.like((b.size(), n))
    ids = ops.argsort(order) if b.random.random() < 0.5 else ops.top_k(order, k=b.random.randint(1, n))
    table = b.like((*order.shape[:-1], n, d))
    b.keep(ops.get_rows(table, ids))
    if len(order.shape) == 1 and ids.node.op == "argsort" and b.random.random() < 0.5:
        b.keep(ops.set_rows(b.like((n + b.size(), d)), b.like((n, d)), ids))


def add_state(b: Builder) -> None:
    """A state with a new value of any kind, read before or after."""
    x = b.any_value()
    old = state(b.key(), x.shape, x.dtype)
    how = b.random.randrange(4)
    new = x if how == 0 else ops.add(old, x) if how == 1 else ops.mul(x, old) if how == 2 else old
    if how == 3 and len(x.shape) >= 1 and x.shape[0]:
        start = b.random.randint(0, x.shape[0])
        old_rows = ops.slice_(old, axis=0, start=start, stop=x.shape[0])
        new = ops.concat(old_rows, ops.slice_(x, axis=0, start=0, stop=start), axis=0)
    b.updates[old] = new
    b.keep(old, new)
    if b.random.random() < 0.3:
        other = state(b.key(), x.shape, x.dtype)
        b.updates[other] = ops.add(old, other) if b.random.random() < 0.5 else old
        b.keep(other)


def add_attention(b: Builder) -> None:
    """Heads from products, odd in number, grouped or not; with the op or by hand."""
    t, h, g, d = b.size() or 1, b.random.choice((1, 2, 3, 5)), b.random.choice((1, 2, 3)), b.random.choice((2, 4))
    e = b.random.choice((4, 6))
    x = b.like((t, e))
    learned = b.random.random() < 0.4
    x = ops.add(x, weight(b.key(), (t, e))) if learned else x

    def heads(n: int) -> Value:
        return ops.reshape(ops.mul_mat(b.leaf_weight((n * d, e)), x), shape=(t, n, d))

    if b.random.random() < 0.5:
        y = ops.attention(heads(h * g), heads(h), heads(h), scale=0.5)
    else:
        q, k, v = (ops.permute(heads(n), axes=(1, 0, 2)) for n in (h * g, h, h))
        p = ops.softmax(ops.mul_mat(ops.cont(k), ops.cont(q)), scale=0.5)
        y = ops.permute(ops.mul_mat(ops.cont(ops.transpose(v)), p), axes=(1, 0, 2))
    b.keep(ops.mul_mat(b.leaf_weight((e, h * g * d)), ops.reshape(y, shape=(t, h * g * d))))


def add_mixer(b: Builder) -> None:
    """An MLP-mixer: products over tokens and over channels in turn."""
    t, e = b.size() or 1, b.size() or 1
    x = b.like((t, e))
    across = ops.mul_mat(
        b.leaf_weight((t, 6)), ops.silu(ops.mul_mat(b.leaf_weight((6, t)), ops.cont(ops.transpose(x))))
    )
    x = ops.add(x, ops.cont(ops.transpose(across)))
    b.keep(ops.add(x, ops.mul_mat(b.leaf_weight((e, 8)), ops.silu(ops.mul_mat(b.leaf_weight((8, e)), x)))))


def down_and_up(b: Builder) -> None:
    """Add a U-net: pairs are merged, processed and split again, and the bypass is concatenated."""
    t, e = 2 * (b.size() or 1), b.size() or 1
    x = b.like((t, e))
    low = ops.silu(ops.mul_mat(b.leaf_weight((e, 2 * e)), ops.reshape(x, shape=(t // 2, 2 * e))))
    high = ops.reshape(ops.mul_mat(b.leaf_weight((2 * e, e)), low), shape=(t, e))
    both = ops.concat(high, x, axis=1)
    b.keep(ops.mul_mat(b.leaf_weight((b.size(), 2 * e)), both), low)


def expert(b: Builder) -> None:
    """A router, and experts up and down."""
    t, n, e, f = b.size() or 1, b.random.choice((3, 4, 5)), b.random.choice((4, 6)), b.random.choice((4, 8))
    x = b.like((t, e))
    scores = ops.softmax(ops.reshape(ops.mul_mat(b.leaf_weight((n, e)), x), shape=(1, t, n)))
    scores = ops.reshape(scores, shape=(t, n))
    ids = ops.top_k(scores, k=b.random.randint(1, n - 1))
    k = ids.shape[-1]
    up = ops.mul_mat_id(weight(b.key(), (n, f, e)), ops.reshape(x, shape=(t, 1, e)), ids)
    if b.random.random() < 0.4:
        up = ops.add_id(up, weight(b.key(), (n, f)), ids)
    down = ops.mul_mat_id(weight(b.key(), (n, e, f)), ops.silu(up), ids)
    share = ops.get_rows(ops.reshape(scores, shape=(t, n, 1)), ids)
    out = ops.sum_rows(ops.permute(ops.mul(down, share), axes=(0, 2, 1)))
    b.keep(ops.reshape(out, shape=(t, e)), *([up] if k and b.random.random() < 0.3 else []))


def spread(b: Builder) -> None:
    x = b.any_value()
    if len(x.shape) < 4:
        wide = ops.broadcast(ops.reshape(x, shape=(1, *x.shape)), shape=(b.random.choice((2, 3, 4)), *x.shape))
        b.keep(wide)
        axis = b.random.randrange(len(x.shape) + 1)
        if b.random.random() < 0.5:
            b.keep(ops.repeat(x, shape=tuple(n * b.random.choice((1, 2)) for n in x.shape)))
        elif axis < len(x.shape):
            b.keep(ops.sum_rows(ops.cont(ops.permute(wide, axes=(*range(1, len(wide.shape)), 0)))))


def add_transpose(b: Builder) -> None:
    x = b.any_value(2)
    axes = list(range(len(x.shape)))
    b.random.shuffle(axes)
    b.keep(ops.permute(x, axes=tuple(axes)))


def any_op(b: Builder) -> None:
    """A node of any op on operands with the shapes of one of its samples."""
    name = b.random.choice(OPS)
    sample(b, REGISTRY[name], b.random.choice(SAMPLES[name]))


def sample(b: Builder, op: Op, text: str) -> None:
    """Add the node of a sample with new operands, in the range that the op declares."""
    parts = parse_case(text)
    if any(isinstance(spec, Spec) and spec.dtype in (DType.Q8_1, DType.Q8_K) for spec in parts.values()):
        return  # these are never dequantised
    operands: dict[str, Value] = {}
    for name, spec in parts.items():
        if not isinstance(spec, Spec):
            continue
        legal = op.ranges.get(name)
        if not spec.dtype.is_float:
            kinds = (weight,) if spec.dtype.is_quantised else (input, weight)
            operands[name] = b.random.choice(kinds)(b.key(), spec.shape, spec.dtype)
        elif spec.dtype is not DType.F32:
            operands[name] = b.random.choice((input, weight))(b.key(), spec.shape, spec.dtype)
        else:
            new_value = b.like(spec.shape) if b.random.random() < 0.8 else weight(b.key(), spec.shape)
            if legal is not None and not new_value.node.is_leaf:
                new_value = ops.clamp(new_value, min=float(legal.low), max=float(legal.high))
            operands[name] = new_value
    built = op(**{**parts, **operands})
    results = (built,) if isinstance(built, Value) else built
    b.keep(*results)
    old = operands.get("state")
    if old is not None and old.node.op == "state" and len(results) == 2 and results[1].spec == old.spec:
        b.updates.setdefault(old, results[1])


def add_any_op(b: Builder) -> None:
    """A node of any op on a value that is there, with a sample's attributes, where it fits."""
    op = REGISTRY[b.random.choice(OPS)]
    if not op.samples:
        return
    parts = parse_case(b.random.choice(op.samples))
    operands = [k for k, v in parts.items() if isinstance(v, Spec)]
    if any(k in op.ranges for k in operands) or not operands:
        return
    x = b.any_value()
    for name in operands:
        parts[name] = x if name == operands[0] or b.random.random() < 0.5 else b.like(x.shape)
    try:
        built = op(**parts)
    except GraphError:
        return
    b.keep(*((built,) if isinstance(built, Value) else built))


def plain(b: Builder) -> None:
    b.random.choice(PLAIN_STEPS)(b)


STEPS = (
    *(
        product,
        product,
        product,
        symmetric,
        add_split_and_join,
        slice_of_a_weight,
        seen_otherwise,
        add_reshape,
        add_reshape,
    ),
    *(
        add_partial_write,
        binary,
        binary,
        unary,
        unary,
        add_reduction,
        looked_up,
        add_state,
        add_attention,
        add_mixer,
        down_and_up,
        expert,
    ),
    *(spread, add_transpose, any_op, any_op, any_op, add_any_op, add_any_op, plain, plain),
)


def wide_graph(seed: int) -> Graph:
    """Return the graph of a seed, with one op in turn and random additions before and after."""
    b = Builder(seed)
    for _ in range(b.random.randint(0, 2)):
        b.keep(b.grow_value(tuple(b.size() for _ in range(b.random.randint(1, 3)))))
    for left in reversed(range(b.random.randint(2, 14))):
        try:
            if left == 1:
                sample(b, REGISTRY[name := OPS[seed % len(OPS)]], b.random.choice(SAMPLES[name]))
            else:
                b.random.choice(STEPS)(b)
        except GraphError:  # operands of other dtypes, or of a size that the op does not take
            continue
    if not b.values:
        b.keep(constant("c", [1.0, 2.0]))
    inner = [v for v in b.values if not v.node.is_leaf] or b.values
    count = b.random.randint(1, 4)
    ends = [inner[-1], *(b.random.choice(inner) for _ in range(count - 1))]
    return Graph({f"y{i}": v for i, v in enumerate(ends)}, b.updates)
