"""Factors: the index ranges of a graph that can be sharded, found from the signatures of its ops.

Every axis of every value is a list of segments (a concatenation such as q|k|v). Every segment is a product of factors,
outer first.

- Equal letters of a signature are one factor in the whole graph (union-find).
- A reshape, a head group, a tiled broadcast or a quantisation block splits a factor into an outer and an inner one.
- A slice splits a factor into segments.

To parallelise is to choose factors: KV heads and FFN columns give tensor parallelism, experts give expert parallelism,
and sequences give data parallelism. Names such as ``attn_q.weight`` are not used.

Example: rows 0 to 3 of a fused weight make q and the rest k, both with two heads of two entries. An op multiplies q and
k head by head. So the rows of the weight are two segments of (head, entry), and the heads of both are one factor. A
device with a shard of this factor has a head of q and the same head of k.

>>> from ... import ops
>>> from ...graph.node import input, weight
>>> both = ops.mul_mat(weight("qk", (8, 3)), input("x", (5, 3)))
>>> q, k = (ops.reshape(ops.slice_(both, axis=1, start=i, stop=i + 4), shape=(5, 2, 2)) for i in (0, 4))
>>> graph = Graph({"y": ops.mul(q, k)})
>>> factors = Factors(graph)
>>> rows, columns = factors.axes_of(graph.weights[0])
>>> rows, columns
([[2, 2], [2, 2]], [[3]])
>>> rows[0][0] is rows[1][0]
True

Named dimensions are from Mesh-TensorFlow (Shazeer et al., 2018), factors from Shardy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ...graph.graph import Graph
from ...graph.node import Node, Value
from ...ops import op_of
from ...ops.declaration.op import Op
from ...ops.declaration.signature import Dimension, DimensionRole, LeadingAxesBroadcast, Operand
from .axes import (
    Axis,
    Factor,
    compute_product_size,
    find_repeated_factors,
    find_segment_bounds,
    forbid_axis_sharding,
    forbid_sharding,
    list_segments,
    make_axis_of_new_factor,
    multiply_axes_into_one,
    split_axis_at,
    unify_axes,
)


@dataclass(frozen=True, slots=True)
class FactorRoles:
    """How each factor (shardable index) occurs in the operands of a node, which decides whether it can shard the node.

    - A plan may not shard `coupled_factors` at this node: the op forbids it, or one factor is two indices of the
      node.
    - `contracted_factors` are summed over.
    - `indexed_factor` has the rows of a table that the node looks up.
    """

    coupled_factors: frozenset[Factor]
    contracted_factors: frozenset[Factor]
    indexed_factor: Factor | None


class Factors:
    """The factors (shardable indices) of a graph: each axis as a product of factors, and their roles in each node."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._axes: dict[Value, tuple[Axis, ...]] = {}
        self._roles: dict[Node, list[tuple[DimensionRole, Axis]]] = {}
        self._index_axes: dict[Node, list[Sequence[Axis]]] = {}  # groups of axes; in each group a factor is one index
        self._lookup_axes: dict[tuple[Value, int], tuple[Axis, str]] = {}
        self._named_axes: list[tuple[Axis, str]] = []
        for node in graph.nodes:
            if node.is_leaf:
                self._create_leaf_axes_of_new_factors(node)
            elif op_of(node).links is not None:
                self._create_result_axes_by_links(node, op_of(node))
            else:
                self._unify_axes_by_signature(node, op_of(node))
        for state, new in graph.updates.items():
            for a, b in zip(self._axes[state], self._axes[new], strict=True):
                unify_axes(a, b)
        self._forbid_sharding_of_split_inner_factors()
        # No factor is split from here on, so results can be cached; the factor search asks often.
        segments_of = cache(list_segments)  # values share axes
        self._final_segments = {v: tuple(map(segments_of, axes)) for v, axes in self._axes.items()}
        self._factor_sets = {
            v: frozenset(f for axis in axes for s in axis for f in s) for v, axes in self._final_segments.items()
        }
        self._factor_roles = {
            node: _compute_coupled_contracted_indexed_roles(roles, self._index_axes[node], segments_of)
            for node, roles in self._roles.items()
        }
        words = [*self._named_axes, *self._lookup_axes.values()]
        self._factor_words = {f: word.replace("_", " ") for axis, word in words for s in segments_of(axis) for f in s}

    # ------------------------------------------------------------------------------------------------ questions

    def axes_of(self, value: Value) -> tuple[list[list[Factor]], ...]:
        """Return the axes of a value; each axis is a list of segments, and each segment a list of factors, outer first.

        A segment is one part of a concatenated axis, such as q|k|v.
        """
        return self._final_segments[value]

    def factors_of(self, value: Value) -> frozenset[Factor]:
        """Return all factors (shardable indices) that occur in an axis of a value."""
        return self._factor_sets[value]

    def find_factor_roles(self, node: Node) -> FactorRoles:
        """Return how a node uses each factor: as an index that no plan may shard, a summed index, or table rows."""
        return self._factor_roles[node]

    def format_signature_name_of_factor(self, factor: Factor) -> str:
        """Return the name of a factor in an op signature, such as ``kv heads``; empty for a name of one letter."""
        return self._factor_words.get(factor, "")

    # ----------------------------------------------------------------------------------------------- building

    def _create_leaf_axes_of_new_factors(self, node: Node) -> None:
        """Create the axes of a weight, state, input or constant, each with one new factor.

        The last axis of a quantised leaf has two factors: the quantisation blocks, and the entries of a block. The
        second is never sharded.
        """
        spec = node.specs[0]
        axes = [make_axis_of_new_factor(n) for n in spec.shape]
        if spec.dtype.is_quantised:
            axes[-1] = ((Factor(spec.shape[-1] // spec.dtype.block), Factor(spec.dtype.block, blocked=True)),)
        self._axes[node.results[0]] = tuple(axes)

    def _unify_axes_by_signature(self, node: Node, declared: Op[Any]) -> None:
        """Give operand axes with equal names in the op's signature equal factors, and create the axes of the results.

        Factors are shardable indices, so a plan shards unified axes alike.
        """
        specs = [None if s is None else s.spec for s in node.src]
        sizes = declared.resolve_sizes(specs, node.attrs)
        signature = declared.signature_for(node.attrs)
        whole = declared.unsharded_dimensions(node.attrs) if declared.unsharded_dimensions else ()
        named: dict[str, Axis] = {}
        leading = self._unify_leading_axes(node, signature.operands)
        roles: list[tuple[DimensionRole, Axis]] = []
        for operand, source in zip(signature.operands, node.src, strict=False):
            if source is None:
                continue
            axes = self._axes[source][len(source.shape) - len(operand.dims) :]
            for dim, axis, size in zip(
                operand.dims, axes, source.shape[len(source.shape) - len(operand.dims) :], strict=True
            ):
                if not (dim.may_be_one and size == 1):
                    self._unify_axis_with_dimension(dim, axis, named, sizes.by_name)
                    role = DimensionRole.COUPLED if set(dim.factors) & set(whole) else dim.role
                    if dim.index and node.attrs["total"]:
                        role = DimensionRole.COUPLED  # the operand is a part of a table already
                    roles.append((role, axis))
                    if dim.index:
                        self._unify_row_axes_of_indexed_tables(node, declared, dim, axis, size)
        summed = self._unify_contracted_leading_axes(node, signature.operands)
        roles += summed
        self._roles[node] = roles
        self._index_axes[node] = [[*named.values(), *leading, *(axis for role, axis in summed)]]
        self._named_axes += [(axis, name) for name, axis in named.items() if len(name) > 1]
        for name, size in sizes.by_name.items():
            named.setdefault(
                name, make_axis_of_new_factor(size, blocked=True)
            )  # of no operand, so a device could not know its range
        for result, value in zip(signature.results, node.results, strict=True):
            own = tuple(self._build_axis_of_dimension(d, named, sizes.by_name) for d in result.dims)
            self._axes[value] = (*leading, *own) if result.leading is LeadingAxesBroadcast.EQUAL else own
            for axis, size in zip(self._axes[value], value.shape, strict=True):
                assert sum(map(compute_product_size, list_segments(axis))) == size, (
                    f"{node!r}: factors do not fit {value!r}"
                )

    def _unify_row_axes_of_indexed_tables(
        self, node: Node, declared: Op[Any], dimension: Dimension, axis: Axis, size: int
    ) -> None:
        """Unify the axes of all tables that the same row numbers index, so that a device has the same rows of each.

        Args:
            node: The node that looks up rows.
            declared: Its op.
            dimension: The indexed dimension of the signature.
            axis: The axis of the table with the rows.
            size: The number of rows.
        """
        numbers = node.src[declared.operand_names.index(dimension.index)]
        assert numbers is not None
        unify_axes(axis, self._lookup_axes.setdefault((numbers, size), (axis, dimension.factors[0]))[0])

    def _unify_axis_with_dimension(
        self, dimension: Dimension, axis: Axis, axis_by_name: dict[str, Axis], size_by_name: Mapping[str, int]
    ) -> None:
        """Give an operand axis the factors of its signature dimension, such as ``d`` or ``(h d)``, so both shard alike.

        Args:
            dimension: The dimension of the signature.
            axis: The axis of the operand.
            axis_by_name: The first axis of each name so far; a new name is added.
            size_by_name: The size of each name.
        """
        if len(dimension.factors) == 1 and dimension.factors[0] not in axis_by_name:
            axis_by_name[dimension.factors[0]] = axis
        else:
            unify_axes(axis, self._build_axis_of_dimension(dimension, axis_by_name, size_by_name))

    def _build_axis_of_dimension(
        self, dimension: Dimension, axis_by_name: dict[str, Axis], size_by_name: Mapping[str, int]
    ) -> Axis:
        """Build the axis of a signature dimension such as ``(h d)``: the product of the axes named ``h`` and ``d``."""
        parts = [
            make_axis_of_new_factor(int(f), blocked=True)
            if f.isdecimal()
            else axis_by_name.setdefault(f, make_axis_of_new_factor(size_by_name[f]))
            for f in dimension.factors
        ]
        if (axis := multiply_axes_into_one(parts)) is not None:
            return axis
        for part in parts:
            forbid_axis_sharding(part)
        return make_axis_of_new_factor(
            math.prod(sum(map(compute_product_size, list_segments(p))) for p in parts), blocked=True
        )

    def _unify_leading_axes(self, node: Node, operands: Sequence[Operand]) -> tuple[Axis, ...]:
        """Unify the leading axes of all operands, such as batch axes, and return the leading axes of the results."""
        shared: tuple[Axis, ...] = ()
        pairs = [(o, s) for o, s in zip(operands, node.src, strict=False) if s is not None]
        for operand, source in pairs:
            mine = self._axes[source][: len(source.shape) - len(operand.dims)]
            if operand.leading is LeadingAxesBroadcast.EQUAL:
                for a, b in zip(shared, mine, strict=False):
                    unify_axes(a, b)
                shared = shared or mine
        for operand, source in pairs:
            mine = self._axes[source][: len(source.shape) - len(operand.dims)]
            if operand.leading in (LeadingAxesBroadcast.TILED, LeadingAxesBroadcast.GROUPED):
                for a, b in zip(reversed(shared), reversed(mine), strict=False):
                    self._unify_broadcast_axis(a, b, operand.leading)
        return shared

    def _unify_contracted_leading_axes(
        self, node: Node, operands: Sequence[Operand]
    ) -> list[tuple[DimensionRole, Axis]]:
        """Unify the leading axes over which the node sums, and return each with the role contracted."""
        summed: list[Axis] = []
        for operand, source in zip(operands, node.src, strict=False):
            if source is not None and operand.leading is LeadingAxesBroadcast.CONTRACTED:
                mine = self._axes[source][: len(source.shape) - len(operand.dims)]
                for a, b in zip(summed, mine, strict=False):
                    unify_axes(a, b)
                summed = summed or list(mine)
        return [(DimensionRole.CONTRACTED, axis) for axis in summed]

    @staticmethod
    def _unify_broadcast_axis(full_axis: Axis, repeated_axis: Axis, leading_axes: LeadingAxesBroadcast) -> None:
        """Give an axis and a smaller axis that is broadcast over it common factors.

        The larger axis becomes the product of the smaller axis and a new factor, which counts the repeats.

        Args:
            full_axis: The larger axis.
            repeated_axis: The smaller axis; it is the inner factor if tiled, and the outer factor if grouped.
            leading_axes: Whether the smaller axis is tiled or grouped.
        """
        size, n = find_segment_bounds(full_axis)[-1], find_segment_bounds(repeated_axis)[-1]
        if n == size:
            unify_axes(full_axis, repeated_axis)
        elif n > 1:
            ratio = make_axis_of_new_factor(size // n)
            axis = multiply_axes_into_one(
                [ratio, repeated_axis] if leading_axes is LeadingAxesBroadcast.TILED else [repeated_axis, ratio]
            )
            if axis is None:
                forbid_axis_sharding(full_axis)
                forbid_axis_sharding(repeated_axis)
            else:
                unify_axes(full_axis, axis)

    def _create_result_axes_by_links(self, node: Node, declared: Op[Any]) -> None:
        """Create the result axes of a view or a concatenation from the operand axes to which the op links them."""
        assert declared.links is not None
        links = declared.links(tuple(None if s is None else s.spec for s in node.src), node.attrs)
        result = node.results[0]
        axis_parts: dict[int, list[tuple[int, Axis]]] = {}
        linked: set[tuple[int, int]] = set()
        for link in links:
            source = node.src[link.operand]
            assert source is not None
            linked |= {(link.operand, a) for a in link.source}
            axis = self._build_product_of_operand_axes(source, link.source)
            if len(link.result) == 1:
                axis = self._slice_axis(axis, link.start, result.shape[link.result[0]])
                axis_parts.setdefault(link.result[0], []).append((link.start, axis))
            else:
                axes_after = [make_axis_of_new_factor(result.shape[a]) for a in link.result]
                product = multiply_axes_into_one(axes_after)
                assert product is not None
                unify_axes(product, axis)
                for a, own in zip(link.result, axes_after, strict=True):
                    axis_parts[a] = [(0, own)]
        axes = []
        for a, size in enumerate(result.shape):
            parts = [axis for _, axis in sorted(axis_parts.get(a, []), key=lambda p: p[0])]
            joined: Axis = tuple(s for axis in parts for s in axis)
            if sum(map(compute_product_size, list_segments(joined))) == size and parts:
                axes.append(joined)
            elif len(parts) > 1 and all(
                find_segment_bounds(p)[-1] == size for p in parts
            ):  # the same axis of several operands
                for p in parts[1:]:
                    unify_axes(parts[0], p)
                axes.append(parts[0])
            else:  # a new factor; only views may shard it, as other ops do not know their range
                axes.append(make_axis_of_new_factor(size, blocked=not declared.is_view))
        self._axes[result] = tuple(axes)
        self._roles[node] = [
            (DimensionRole.COUPLED, self._axes[s][a])
            for i, s in enumerate(node.src)
            if s is not None
            for a in range(len(s.shape))
            if (i, a) not in linked
        ]
        self._index_axes[node] = [self._axes[v] for v in (*node.inputs, result)]

    def _build_product_of_operand_axes(self, operand: Value, axis_numbers: Sequence[int]) -> Axis:
        """Multiply several axes of an operand into one axis.

        If they have no product, the result is a new axis that no plan may shard.
        """
        axes = [self._axes[operand][a] for a in axis_numbers]
        product = multiply_axes_into_one(axes)
        if product is None:
            for axis in axes:
                forbid_axis_sharding(axis)
            return make_axis_of_new_factor(math.prod(operand.shape[a] for a in axis_numbers), blocked=True)
        return product

    @staticmethod
    def _slice_axis(axis: Axis, start: int, length: int) -> Axis:
        """Return the part of an axis from entry `start` on, with `length` entries, as segments.

        An axis of at most `length` entries is returned whole. If a segment cannot begin at `start` or at the end, the
        result is a new axis that no plan may shard.
        """
        if find_segment_bounds(axis)[-1] <= length:
            return axis
        if not split_axis_at(axis, (start, start + length)):
            return make_axis_of_new_factor(length, blocked=True)
        segments = zip(find_segment_bounds(axis), list_segments(axis), strict=False)
        return tuple(tuple(s) for at, s in segments if start <= at < start + length)

    def _forbid_sharding_of_split_inner_factors(self) -> None:
        """Forbid sharding of factors that were split into a concatenation and are an inner factor of some product.

        Only the outermost factor of a product may be a concatenation.
        """
        for axes in self._axes.values():
            for axis in axes:
                for product in list_segments(axis):
                    for factor in product[1:]:
                        if factor.segments:
                            forbid_sharding([factor])


def _compute_coupled_contracted_indexed_roles(
    axes_with_role: Sequence[tuple[DimensionRole, Axis]],
    index_axes: Sequence[Sequence[Axis]],
    segments_of: Callable[[Axis], list[list[Factor]]],
) -> FactorRoles:
    """Compute the roles of a node's factors (coupled, contracted or indexed) from the roles of its axes.

    Args:
        axes_with_role: Each axis of the operands with its role in the signature.
        index_axes: Groups of axes with different indices. A factor that occurs twice in a group is coupled.
        segments_of: Returns the final segments of an axis.
    """
    used: dict[DimensionRole, set[Factor]] = {role: set() for role in DimensionRole}
    for axes in index_axes:
        used[DimensionRole.COUPLED] |= find_repeated_factors(map(segments_of, axes))
    for role, axis in axes_with_role:
        parts = segments_of(axis)
        if role is DimensionRole.INDEXED and (len(parts) > 1 or len(parts[0]) > 1):
            role = DimensionRole.COUPLED  # a device has one range of rows
        used[role].update(f for s in parts for f in s)
    looked_up = next(iter(used[DimensionRole.INDEXED] - used[DimensionRole.COUPLED]), None)
    return FactorRoles(frozenset(used[DimensionRole.COUPLED]), frozenset(used[DimensionRole.CONTRACTED]), looked_up)
