"""The arithmetic of axes: an axis is a list of segments, and a segment is a product of factors, outer first.

A factor is an index of the graph that a plan can shard, such as the KV heads. A segment is one part of a concatenated
axis, such as q|k|v. `unify_axes` makes two axes the same index in three steps:

1. Merge factors of one size.
2. Split a larger factor if a smaller one divides it.
3. Split an axis into segments where the other axis has a segment boundary.

Factors that cannot be unified are blocked: no plan shards them. In the example, an axis of 3 heads of 2 entries is
unified with a flat axis of 6. The flat axis becomes the product of the same two factors:

>>> heads, flat = ((Factor(3), Factor(2)),), make_axis_of_new_factor(6)
>>> unify_axes(heads, flat)
>>> list_segments(flat)
[[3, 2]]
>>> list_segments(flat)[0][0] is heads[0][0].find_root()
True
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


class Factor:
    """A shardable index of a graph with `size` values, such as the attention heads; several axes may share it.

    If a plan shards a factor, each device has some of its values, in all axes that share it. Factors are nodes of a
    union-find structure, so compare them by `find_root`.

    - `up` is the factor into which this one was merged.
    - `parts` are the outer and the inner factor, if this one was split into a product.
    - `segments` are the two parts, if this one was split into a concatenation.
    - `blocked` forbids sharding.
    """

    __slots__ = ("blocked", "parts", "segments", "size", "up")

    def __init__(self, size: int, blocked: bool = False) -> None:
        self.size: int = size
        self.blocked: bool = blocked
        self.up: Factor | None = None
        self.parts: tuple[Factor, Factor] | None = None  # of a product: outer and inner
        self.segments: tuple[Factor, Factor] | None = None  # of a concatenation

    def find_root(self) -> Factor:
        """Find the root in the union-find tree: the factor into which this factor was merged, or the factor itself."""
        factor = self
        while factor.up is not None:
            factor = factor.up
        return factor

    @property
    def can_be_sharded(self) -> bool:
        """Whether a plan may shard this factor: it has several values and is not blocked."""
        return self.size > 1 and not self.blocked

    def __repr__(self) -> str:
        return f"{self.size}{'!' if self.blocked else ''}"


Segment = tuple[Factor, ...]
Axis = tuple[Segment, ...]


def replace_merged_and_split_factors(segment: Iterable[Factor]) -> list[Factor]:
    """Return a product of factors in its present form: merged and split factors are replaced, outer first.

    A merged factor is replaced by its root, and a factor that was split into a product by its outer and inner factor.
    """
    product: list[Factor] = []
    for factor in segment:
        root = factor.find_root()
        product += replace_merged_and_split_factors(root.parts) if root.parts else [root]
    return product


def list_segments(axis: Axis) -> list[list[Factor]]:
    """List the segments of an axis (parts of a concatenation such as q|k|v), each as a list of factors, outer first.

    If the outermost factor of a segment was split into a concatenation, each part of the factor gives a segment.
    """
    products: list[list[Factor]] = []
    ahead = list(reversed(axis))
    while ahead:
        product = replace_merged_and_split_factors(ahead.pop())
        if product and product[0].segments:
            ahead += [(segment, *product[1:]) for segment in reversed(product[0].segments)]
        else:
            products.append(product)
    return products


def compute_product_size(product: Iterable[Factor]) -> int:
    """Compute the number of entries of a product of factors, which is the product of their sizes."""
    return math.prod(f.size for f in product)


def forbid_sharding(factors: Iterable[Factor]) -> None:
    """Mark factors so that no plan shards them, for example because two views divide one axis in different ways."""
    ahead = replace_merged_and_split_factors(factors)
    while ahead:
        factor = ahead.pop()
        factor.blocked = True
        if factor.segments:
            ahead += replace_merged_and_split_factors(factor.segments)


def forbid_axis_sharding(axis: Axis) -> None:
    """Forbid that a plan shards any factor of an axis."""
    for segment in axis:
        forbid_sharding(segment)


def split_factor_in_all_axes(factor: Factor, outer_size: int) -> None:
    """Split a factor into a product, in all axes that have it: an outer factor of `outer_size` and an inner factor."""
    factor.parts = (Factor(outer_size, factor.blocked), Factor(factor.size // outer_size, factor.blocked))


def merge_factors(factor: Factor, other_factor: Factor) -> None:
    """Merge two factors (shardable indices) of equal size into one, in all axes that have them.

    Both are roots of the union-find structure.
    """
    if factor is other_factor:
        return
    if other_factor.segments and not factor.segments:
        factor, other_factor = other_factor, factor
    other_factor.up = factor
    factor.blocked |= other_factor.blocked
    if factor.segments and other_factor.segments:
        unify_axes((factor.segments[:1], factor.segments[1:]), (other_factor.segments[:1], other_factor.segments[1:]))


def unify_products(product: Sequence[Factor], other_product: Sequence[Factor]) -> None:
    """Make two products of factors equal, factor by factor, outer first; both have the same total size.

    Example: [6] and [2, 3] are made equal by splitting 6 into 2 and 3. Two factors of equal size are merged. Of two
    different sizes, the larger factor is split if the smaller size divides it. Otherwise these two and all inner
    factors may not be sharded.
    """
    left, right, i = replace_merged_and_split_factors(product), replace_merged_and_split_factors(other_product), 0
    while i < min(len(left), len(right)):
        x, y = left[i], right[i]
        if x is y or x.size == y.size:
            merge_factors(x, y)
            i += 1
        elif y.size and x.size % y.size == 0 and not x.segments:
            split_factor_in_all_axes(x, y.size)
        elif x.size and y.size % x.size == 0 and not y.segments:
            split_factor_in_all_axes(y, x.size)
        else:
            forbid_sharding(left[i:] + right[i:])
            return
        left, right = replace_merged_and_split_factors(left), replace_merged_and_split_factors(right)


def split_segment_before_entry(segment: Sequence[Factor], entry: int) -> bool:
    """Split a segment of an axis (a part of a concatenation) so that a new segment begins at `entry`; return success.

    `entry` must be a multiple of the size of all inner factors. If it is not, the factors of the segment may not be
    sharded.
    """
    inner = compute_product_size(segment[1:])
    head = segment[0]
    if inner and entry % inner == 0:
        head.segments = (Factor(entry // inner, head.blocked), Factor(head.size - entry // inner, head.blocked))
        return True
    forbid_sharding(segment)
    return False


def find_segment_bounds(axis: Axis) -> list[int]:
    """Find the bounds of the segments (concatenated parts) of an axis: their first entries, then the axis size."""
    at = [0]
    for product in list_segments(axis):
        at.append(at[-1] + compute_product_size(product))
    return at


def split_axis_at(axis: Axis, first_entries: Iterable[int]) -> bool:
    """Split an axis into segments (parts of a concatenation) so that one begins at each of the given entries.

    Return False if a split is impossible.
    """
    for point in first_entries:
        found = _find_segment_across_entry(axis, point)
        if found is not None and not split_segment_before_entry(*found):
            return False
    return True


def _find_segment_across_entry(axis: Axis, entry: int) -> tuple[list[Factor], int] | None:
    """Find the segment that has entries both before and after `entry`, with the offset of `entry` in it.

    The result is None if a segment begins at `entry`.
    """
    before, ahead = entry, list(reversed(axis))
    while ahead and before > 0:
        product = replace_merged_and_split_factors(ahead.pop())
        size = compute_product_size(product)
        if size <= before:
            before -= size
        elif product[0].segments:
            ahead += [(segment, *product[1:]) for segment in reversed(product[0].segments)]
        else:
            return product, before
    return None


def unify_axes(axis: Axis, other_axis: Axis) -> None:
    """Make two axes of equal size share their factors, so that a plan shards them alike.

    If that is impossible, sharding of their factors is forbidden.
    """
    for _ in range(4):  # a split may change both axes, as they share factors
        if find_segment_bounds(axis) == find_segment_bounds(other_axis):
            break
        split_axis_at(axis, find_segment_bounds(other_axis))
        split_axis_at(other_axis, find_segment_bounds(axis))
    else:
        forbid_axis_sharding(axis)
        forbid_axis_sharding(other_axis)
        return
    for a, b in zip(list_segments(axis), list_segments(other_axis), strict=True):
        unify_products(a, b)


def find_repeated_factors(axes: Iterable[Sequence[Sequence[Factor]]]) -> set[Factor]:
    """Find the factors (shardable indices) that occur twice in these axes, so that they cannot shard a node.

    Example: in ``W Wᵀ`` both axes are the rows of ``W``.
    """
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


def make_axis_of_new_factor(size: int, blocked: bool = False) -> Axis:
    """Make an axis with a single new factor (shardable index) of `size` entries.

    Args:
        size: The number of entries.
        blocked: Whether sharding of the factor is forbidden.
    """
    return ((Factor(size, blocked),),)


def multiply_axes_into_one(axes: Sequence[Axis]) -> Axis | None:
    """Return the axis that a reshape of several axes into one has, outer first.

    The result is None if an axis other than the first is a concatenation, because a product of factors cannot express
    that.
    """
    wide = [a for a in axes if sum(map(compute_product_size, list_segments(a))) != 1]
    if not wide:
        return make_axis_of_new_factor(1)
    if len(wide) == 1:
        return wide[0]
    if any(len(list_segments(a)) > 1 for a in wide[1:]):
        return None
    inner = tuple(f for a in wide[1:] for s in list_segments(a) for f in s)
    return tuple((*s, *inner) for s in list_segments(wide[0]))
