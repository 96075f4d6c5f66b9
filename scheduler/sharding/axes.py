"""The arithmetic of axes: products of factors, and what it takes to make two of them one index.

An axis is a list of segments, a segment a product of factors, outer first.  `tie` makes two axes the same: it merges
factors of one size, splits a larger one where a smaller divides it, and cuts one where the other has a seam.  What
cannot be made to agree is blocked: no plan cuts it.

>>> heads, flat = ((Factor(3), Factor(2)),), fresh(6)
>>> tie(heads, flat)
>>> segments(flat)
[[3, 2]]
>>> segments(flat)[0][0] is heads[0][0].root()
True
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


class Factor:
    """One index of the graph, or (once split or cut) the name of several; compare what `root` gives."""

    __slots__ = ("blocked", "parts", "segments", "size", "up")

    def __init__(self, size: int, blocked: bool = False) -> None:
        self.size: int = size
        self.blocked: bool = blocked
        self.up: Factor | None = None
        self.parts: tuple[Factor, Factor] | None = None  # outer and inner
        self.segments: tuple[Factor, Factor] | None = None  # one after the other

    def root(self) -> Factor:
        factor = self
        while factor.up is not None:
            factor = factor.up
        return factor

    @property
    def can_be_cut(self) -> bool:
        return self.size > 1 and not self.blocked

    def __repr__(self) -> str:
        return f"{self.size}{'!' if self.blocked else ''}"


Segment = tuple[Factor, ...]
Axis = tuple[Segment, ...]


def atoms(segment: Iterable[Factor]) -> list[Factor]:
    """A product as its roots that are not split further, outer first."""
    product: list[Factor] = []
    for factor in segment:
        root = factor.root()
        product += atoms(root.parts) if root.parts else [root]
    return product


def segments(axis: Axis) -> list[list[Factor]]:
    """An axis as it is now: a factor that was cut, where it is outermost, gives a segment for each of its pieces."""
    products: list[list[Factor]] = []
    ahead = list(reversed(axis))
    while ahead:
        product = atoms(ahead.pop())
        if product and product[0].segments:
            ahead += [(piece, *product[1:]) for piece in reversed(product[0].segments)]
        else:
            products.append(product)
    return products


def product_size(product: Iterable[Factor]) -> int:
    return math.prod(f.size for f in product)


def block(factors: Iterable[Factor]) -> None:
    """These can never be cut: two views of one axis disagree about them."""
    ahead = atoms(factors)
    while ahead:
        factor = ahead.pop()
        factor.blocked = True
        if factor.segments:
            ahead += atoms(factor.segments)


def block_axis(axis: Axis) -> None:
    for segment in axis:
        block(segment)


def split(factor: Factor, outer: int) -> None:
    """`factor` becomes a product of `outer` and the rest, everywhere at once."""
    factor.parts = (Factor(outer, factor.blocked), Factor(factor.size // outer, factor.blocked))


def merge(one: Factor, two: Factor) -> None:
    """Two roots of one size become one factor."""
    if one is two:
        return
    if two.segments and not one.segments:
        one, two = two, one
    two.up = one
    one.blocked |= two.blocked
    if one.segments and two.segments:
        tie((one.segments[:1], one.segments[1:]), (two.segments[:1], two.segments[1:]))


def tie_products(a: Sequence[Factor], b: Sequence[Factor]) -> None:
    """Make two products the same index: align them outer first, splitting the larger factor where it divides."""
    left, right, i = atoms(a), atoms(b), 0
    while i < min(len(left), len(right)):
        x, y = left[i], right[i]
        if x is y or x.size == y.size:
            merge(x, y)
            i += 1
        elif y.size and x.size % y.size == 0 and not x.segments:
            split(x, y.size)
        elif x.size and y.size % x.size == 0 and not y.segments:
            split(y, x.size)
        else:
            block(left[i:] + right[i:])
            return
        left, right = atoms(left), atoms(right)


def cut_segment(product: Sequence[Factor], at: int) -> bool:
    """Cut a segment in two at element `at`; False (and blocked) where no outermost factor ends there."""
    inner = product_size(product[1:])
    head = product[0]
    if inner and at % inner == 0:
        head.segments = (Factor(at // inner, head.blocked), Factor(head.size - at // inner, head.blocked))
        return True
    block(product)
    return False


def bounds(axis: Axis) -> list[int]:
    """Where segments begin, and the end."""
    at = [0]
    for product in segments(axis):
        at.append(at[-1] + product_size(product))
    return at


def refine(axis: Axis, at: Iterable[int]) -> bool:
    """Cut `axis` so that segments begin at each of these elements; False where it cannot be done."""
    for point in at:
        found = _segment_around(axis, point)
        if found is not None and not cut_segment(*found):
            return False
    return True


def _segment_around(axis: Axis, point: int) -> tuple[list[Factor], int] | None:
    """The segment with an element on both sides of `point`, and the elements before; None where segments meet."""
    before, ahead = point, list(reversed(axis))
    while ahead and before > 0:
        product = atoms(ahead.pop())
        size = product_size(product)
        if size <= before:
            before -= size
        elif product[0].segments:
            ahead += [(piece, *product[1:]) for piece in reversed(product[0].segments)]
        else:
            return product, before
    return None


def tie(one: Axis, two: Axis) -> None:
    """Make two axes the same index."""
    for _ in range(4):  # a cut in one may show in the other, where they share factors
        if bounds(one) == bounds(two):
            break
        refine(one, bounds(two))
        refine(two, bounds(one))
    else:
        block_axis(one)
        block_axis(two)
        return
    for a, b in zip(segments(one), segments(two), strict=True):
        tie_products(a, b)


def repeated(axes: Iterable[Sequence[Sequence[Factor]]]) -> set[Factor]:
    """Factors that stand in two of these axes, or twice in one product: as in both axes of `W Wᵀ`."""
    seen, twice = set[Factor](), set[Factor]()
    for axis in axes:
        own = set[Factor]()
        for product in axis:
            own.update(product)
            if len(product) > 1 and len(set(product)) < len(product):
                twice.update(f for f in product if product.count(f) > 1)
        twice |= seen & own
        seen |= own
    return twice


def fresh(size: int, blocked: bool = False) -> Axis:
    return ((Factor(size, blocked),),)


def multiply(axes: Sequence[Axis]) -> Axis | None:
    """The product of axes, outer first; None if an inner one is a concatenation, which no product can say."""
    wide = [a for a in axes if sum(map(product_size, segments(a))) != 1]
    if not wide:
        return fresh(1)
    if len(wide) == 1:
        return wide[0]
    if any(len(segments(a)) > 1 for a in wide[1:]):
        return None
    inner = tuple(f for a in wide[1:] for s in segments(a) for f in s)
    return tuple((*s, *inner) for s in segments(wide[0]))
