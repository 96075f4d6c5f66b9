"""Sharding propagation: the factor that shards each node, and the layout of every value that follows from it.

A factor is a shardable index of the graph. The first rule that applies gives the layouts of a node. ``f`` is a chosen
factor that shards an operand already, or that may shard a weight or state of the node.

1. The node is pinned to one device. Operands and results are `Local`.
2. ``f`` is one index of every result. Results are `FactorShard` of ``f``, and so are operands that have ``f``. All
   other operands are `Replicate`.
3. ``f`` is contracted. Operands are as in rule 2, and results are `Partial`.
4. ``f`` is the row index of a table. The table is `FactorShard` of ``f``, and the row numbers are `Replicate`. The
   result is `TableLookupPartial`, or `Partial` if the node adds other operands; these are read as partial sums.
5. The node is linear in its operands that are partial sums. These stay partial sums, and so do the results. All other
   operands are `Replicate`.
6. A partial sum that the node reads is scattered by rows ``r``, one index of every result. Results are `FactorShard` of
   ``r``, and so are operands that have ``r``. All other operands are `Replicate`.
7. Otherwise operands and results are `Replicate`: every device computes the whole node.

A factor that stands for two indices of a node (both rows of ``W Wᵀ``) cannot shard it: a device would have only a block
on the diagonal. An operand in another layout is converted. A feed-forward layer that is sharded by its width converts
only its sum:

>>> from ... import ops
>>> from ...graph.node import input, weight
>>> x = input("x", (3, 4))
>>> wide = ops.silu(ops.mul_mat(weight("up", (8, 4)), x))
>>> graph = Graph({"y": ops.mul_mat(weight("down", (4, 8)), wide)})
>>> factors = Factors(graph)
>>> width = factors.factors_of(wide) & factors.factors_of(graph.weights[0])
>>> layout = propagate_layouts(graph, factors, width)
>>> for value, state in layout.produced_layouts.items():
...     print(f"{value.node.op:8}{state!r}")
weight  FactorShard(factor=8)
weight  FactorShard(factor=8)
input   Replicate()
mul_mat FactorShard(factor=8)
silu    FactorShard(factor=8)
mul_mat Partial()
>>> [(c.source_layout, c.target_layout) for c in layout.conversions]
[(Partial(), Replicate())]
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...graph.graph import Graph
from ...graph.node import Node, Value
from ...ops import op_of
from ..ir.layout import PARTIAL, REPLICATE, Local
from .axes import Factor, find_repeated_factors
from .factor_layouts import FactorLayout, FactorShard, TableLookupPartial, find_conversion_path
from .factors import FactorRoles, Factors
from .pins import NO_PINS, Pins


@dataclass(frozen=True, slots=True)
class LayoutConversion:
    """A conversion of `value` from `source_layout` to `target_layout`, which is executed before `reader_node`.

    `reader_node` is None if the conversion is for an output or a state update.
    """

    value: Value
    source_layout: FactorLayout
    target_layout: FactorLayout
    reader_node: Node | None

    @property
    def needs_no_communication(self) -> bool:
        """Whether the conversion sends nothing, because every device has the whole value before it."""
        return self.source_layout is REPLICATE


@dataclass(slots=True)
class ShardingAssignment:
    """A sharding of a graph: the layout of every value and node over the devices, and the layout conversions.

    - `produced_layouts`: the layout in which each value is produced.
    - `node_layouts`: the factor that shards each node, or the partial sum that it passes on. It is `Local` for a node
      on one device, and `Replicate` if every device computes all of it.
    - `operand_layouts`: the layouts in which each node reads its operands.
    - `index_operands`: for each node that looks up rows of a sharded table, the operand with the row numbers.
    - `fixed_leaves`: weights and states with a layout from the pins.
    - `replicated_weights`: weights that stay whole, although they have a factor that is sharded.
    - `base_assignment`: an assignment that differs from this one only at `recomputed_nodes`.
    """

    sharded_factors: frozenset[Factor]
    produced_layouts: dict[Value, FactorLayout] = field(default_factory=dict)
    node_layouts: dict[Node, FactorLayout] = field(default_factory=dict)
    operand_layouts: dict[Node, tuple[FactorLayout, ...]] = field(default_factory=dict)
    index_operands: dict[Node, Value] = field(default_factory=dict)
    fixed_leaves: set[Value] = field(default_factory=set)
    conversions: list[LayoutConversion] = field(default_factory=list)
    replicated_weights: frozenset[Value] = frozenset()
    base_assignment: ShardingAssignment | None = None
    recomputed_nodes: tuple[Node, ...] = ()


def list_present_operands_by_name(node: Node) -> list[tuple[str, Value]]:
    """List the operands of a node as pairs (name, value), without optional operands that the node does not have."""
    return [(n, s) for n, s in zip(op_of(node).operand_names, node.src, strict=False) if s is not None]


def find_table_rows_and_added_operands(node: Node) -> tuple[str, Value, Sequence[str]]:
    """Find the operands of a table lookup: the name of the table, the row numbers, and names of all added operands.

    The last result has the names of the table and of operands that the op adds to its rows.
    """
    declared = op_of(node)
    looked_up = declared.signature_for(node.attrs).indexed_dimension
    assert looked_up is not None
    table, dim = looked_up
    joint = next(j for j in (k.split("+") for k in declared.linear_operands(node.attrs)) if table.name in j)
    return table.name, dict(list_present_operands_by_name(node))[dim.index], joint


def propagate_layouts(
    graph: Graph,
    factors: Factors,
    chosen_factors: frozenset[Factor],
    pins: Pins = NO_PINS,
    replicated_values: Iterable[Value] = (),
    row_factor: Factor | None = None,
    early_sums: Container[Value] = frozenset(),
) -> ShardingAssignment:
    """Derive the layout of every value of a graph, and the layout conversions, from the factors to shard.

    A weight that one node needs whole stays whole on every device. Nodes that can use a slice of it take the slice.

    Args:
        graph: The graph to shard.
        factors: The factors of `graph`, its shardable indices.
        chosen_factors: The factors to shard.
        pins: Nodes on one device, and leaves with a fixed layout.
        replicated_values: Values that end whole on every device, for other pipeline stages.
        row_factor: The factor of rows over which a partial sum is scattered if a node cannot pass it on.
        early_sums: Partial sums that are completed at once: no node passes them on.
    """
    users = graph.users()
    return propagate_until_no_weight_is_gathered(
        lambda whole: LayoutPropagation(
            graph, factors, chosen_factors, users, whole, pins, row_factor, early_sums
        ).propagate_and_convert_outputs(replicated_values)
    )


def propagate_until_no_weight_is_gathered(
    propagate: Callable[[frozenset[Value]], ShardingAssignment],
) -> ShardingAssignment:
    """Derive layouts until no sharded weight has to be gathered in a run; each round replicates the gathered weights.

    Args:
        propagate: Derives the layouts for a given set of weights that stay whole.
    """
    whole = frozenset[Value]()
    while True:
        assignment = propagate(whole)
        sharded_values = (c.value for c in assignment.conversions if isinstance(c.source_layout, FactorShard))
        gathered = frozenset(value for value in sharded_values if value.node.op == "weight")
        if not gathered:
            return assignment
        whole |= gathered


class LayoutPropagation:
    """Derives the layouts of all values of a graph, node by node, from the chosen factors (indices to shard)."""

    def __init__(
        self,
        graph: Graph,
        factors: Factors,
        chosen_factors: frozenset[Factor],
        users_of_value: Mapping[Value, list[Node]],
        replicated_weights: frozenset[Value],
        pins: Pins = NO_PINS,
        row_factor: Factor | None = None,
        early_sums: Container[Value] = frozenset(),
    ) -> None:
        self.graph, self.factors, self.users_of_value, self.replicated_weights, self.pins = (
            graph,
            factors,
            users_of_value,
            replicated_weights,
            pins,
        )
        self.row_factor, self.early_sums = row_factor, early_sums
        self.assignment = ShardingAssignment(
            chosen_factors if row_factor is None else chosen_factors | {row_factor},
            replicated_weights=replicated_weights,
        )
        self.converted_layouts: set[tuple[Value, FactorLayout]] = set()
        self.stored_values: set[Value] = set()  # weights, states and their views: shards save bytes to keep and read
        self.final_values = {*graph.outputs.values(), *graph.updates.values()}

    def propagate_and_convert_outputs(self, replicated_values: Iterable[Value] = ()) -> ShardingAssignment:
        """Derive the layouts of all nodes in order, and add the conversions of outputs; return the assignment."""
        for node in self.graph.nodes:
            self._assign_node_layouts(node)
        self._add_output_conversions(replicated_values)
        return self.assignment

    def _assign_node_layouts(self, node: Node) -> None:
        """Assign the layouts of one node: of its result for a leaf, otherwise of its operands and results."""
        if node.is_leaf:
            self._assign_leaf_layout(node)
        else:
            self._assign_computation_layouts(node)

    def _add_output_conversions(self, replicated_values: Iterable[Value] = ()) -> None:
        """Add the conversions of outputs, of `replicated_values` and of state updates to their final layouts."""
        for value in self.graph.outputs.values():
            if self.assignment.produced_layouts[value].is_partial:
                self._add_missing_conversions(value, REPLICATE, None)
        for value in replicated_values:
            self._add_missing_conversions(value, REPLICATE, None)
        for state, new in self.graph.updates.items():
            self._add_missing_conversions(new, self.assignment.produced_layouts[state], None)

    def _assign_leaf_layout(self, node: Node) -> None:
        """Assign the layout of a leaf: a fixed one, or a shard of its largest chosen factor, or else `Replicate`."""
        value = node.results[0]
        if (fixed_layout := self.pins.leaves.get(value)) is not None:
            self.assignment.produced_layouts[value] = fixed_layout
            self.assignment.fixed_leaves.add(value)
            if fixed_layout is REPLICATE:
                self.stored_values.add(value)
            return
        cuts: list[Factor] = []
        if node.op in ("weight", "state"):
            self.stored_values.add(value)
            cuts = self._list_chosen_factors(value)
        is_sharded = (
            cuts
            and value not in self.replicated_weights
            and cuts[0] not in find_repeated_factors(self.factors.axes_of(value))
        )
        self.assignment.produced_layouts[value] = FactorShard(cuts[0]) if is_sharded else REPLICATE

    def _list_chosen_factors(self, value: Value) -> list[Factor]:
        """List the factors of a value that the plan shards, largest first; the first one shards a weight or state."""
        if self.factors.factors_of(value).isdisjoint(self.assignment.sharded_factors):
            return []
        ordered = (
            f for axis in self.factors.axes_of(value) for s in axis for f in s if f in self.assignment.sharded_factors
        )
        return sorted(dict.fromkeys(ordered), key=lambda f: -f.size)

    def _assign_computation_layouts(self, node: Node) -> None:
        """Assign operand and result layouts to a node, by the first rule of the module docstring that applies."""
        by: FactorLayout
        wants: tuple[FactorLayout, ...]
        results: tuple[FactorLayout, ...]
        if (pin := self.pins.nodes.get(node)) is not None:
            by = Local((pin.device,))
            wants, results = (by,) * len(node.inputs), (by,) * len(node.specs)
        elif (factor := self._choose_legal_factor_with_largest_operands(node)) is None:
            wants, by = self._choose_layouts_without_factor(node)
            if by is REPLICATE and self.row_factor is not None and self._can_scatter_rows(node, self.row_factor):
                by = FactorShard(self.row_factor)
                wants = tuple(by if self.row_factor in self.factors.factors_of(s) else REPLICATE for s in node.inputs)
            results = tuple(by for _ in node.results)
        elif factor is self.factors.find_factor_roles(node).indexed_factor:
            wants, summed = self._choose_lookup_layouts(node, factor)
            by, results = FactorShard(factor), (summed,)
        else:
            by = FactorShard(factor)
            wants = tuple(by if factor in self.factors.factors_of(s) else REPLICATE for s in node.inputs)
            results = tuple(by if factor in self.factors.factors_of(v) else PARTIAL for v in node.results)
        self.assignment.node_layouts[node], self.assignment.operand_layouts[node] = by, wants
        for source, want in zip(node.inputs, wants, strict=True):
            self._add_missing_conversions(source, want, node)
        self.assignment.produced_layouts.update(zip(node.results, results, strict=True))
        if op_of(node).is_view and node.inputs[0] in self.stored_values and not isinstance(by, Local):
            self.stored_values.add(node.results[0])

    def _choose_legal_factor_with_largest_operands(self, node: Node) -> Factor | None:
        """Choose the factor that shards a node: the legal one (rules 2 to 4) with most operand bytes, or None."""
        candidates: dict[Factor, None] = {}  # ordered, so that every plan breaks ties equally
        for source in node.inputs:
            layout = self.assignment.produced_layouts[source]
            if isinstance(layout, FactorShard):
                candidates[layout.factor] = None
            elif self._is_weight_or_state(source):
                candidates |= dict.fromkeys(self._list_chosen_factors(source))
        if not candidates:
            return None
        uses = self.factors.find_factor_roles(node)
        legal = [f for f in candidates if f not in uses.coupled_factors and self._can_shard_node(node, f, uses)]
        return max(
            legal,
            key=lambda f: (f is not self.row_factor, self._count_bytes_of_operands_with_factor(node, f)),
            default=None,
        )

    def _can_scatter_rows(self, node: Node, row_factor: Factor) -> bool:
        """Return whether a sum that `node` reads can be reduce-scattered by rows instead of all-reduced (rule 6)."""
        uses = self.factors.find_factor_roles(node)
        if (
            row_factor in uses.coupled_factors
            or row_factor is uses.indexed_factor
            or not all(row_factor in self.factors.factors_of(v) for v in node.results)
        ):
            return False
        sums = (
            s
            for s in node.inputs
            if self.assignment.produced_layouts[s].is_partial and row_factor in self.factors.factors_of(s)
        )
        return any(not self._is_converted_to_layout(s, REPLICATE) for s in sums)

    def _can_shard_node(self, node: Node, factor: Factor, roles: FactorRoles) -> bool:
        """Return whether `factor` can shard `node`: all results have it, or none has it and the node sums over it.

        A lookup sums over the rows of its table.
        """
        has = [factor in self.factors.factors_of(v) for v in node.results]
        if factor is roles.indexed_factor:
            table, _, joint = find_table_rows_and_added_operands(node)
            others = [s for n, s in list_present_operands_by_name(node) if n != table]
            summed = [s for n, s in list_present_operands_by_name(node) if n in joint and n != table]
            alone = not any(has) and not any(factor in self.factors.factors_of(s) for s in others)
            return alone and not any(isinstance(self.assignment.produced_layouts[s], FactorShard) for s in summed)
        if any(has) or factor not in roles.contracted_factors or len(has) > 1:
            return all(has)
        axes = [axis for s in node.inputs for axis in self.factors.axes_of(s)]
        return all(factor in segment for axis in axes if any(factor in s for s in axis) for segment in axis)

    def _count_bytes_of_operands_with_factor(self, node: Node, factor: Factor) -> int:
        """Count the bytes of the operands of `node` that have `factor` as an index."""
        return sum(s.spec.nbytes for s in node.inputs if factor in self.factors.factors_of(s))

    def _choose_lookup_layouts(self, node: Node, factor: Factor) -> tuple[tuple[FactorLayout, ...], FactorLayout]:
        """Choose the operand layouts and the result layout of a lookup, such as an embedding, in sharded table rows.

        Each device looks up the rows of its shard (rule 4). Operands that are added to them are read as partial sums.
        """
        table, ids, joint = find_table_rows_and_added_operands(node)
        self.assignment.index_operands[node] = ids
        routed = TableLookupPartial(factor, ids)
        wants: list[FactorLayout] = []
        result_layout: FactorLayout = routed if self._is_result_routed_like_operand(node, ids, routed) else PARTIAL
        for name, source in list_present_operands_by_name(node):
            state = self.assignment.produced_layouts[source]
            if name == table:
                wants.append(FactorShard(factor))
            elif state == routed and self._is_result_routed_like_operand(node, source, routed):
                wants.append(routed)
            elif name in joint:
                wants.append(state if state.is_partial else PARTIAL)
                result_layout = PARTIAL
            else:
                wants.append(REPLICATE)
        return tuple(wants), result_layout

    @staticmethod
    def _is_result_routed_like_operand(node: Node, operand: Value, routed_layout: TableLookupPartial) -> bool:
        """Return whether each entry of a result is complete on the device that has the operand's complete entry.

        For that, the leading axes of the operand, which the row numbers index, must be the leading axes of the
        result.
        """
        specs = [None if s is None else s.spec for s in node.src]
        places = [i for i, s in enumerate(node.src) if s == operand]
        count = len(routed_layout.index_operand.shape)
        return all(op_of(node).keeps_leading_axes(specs, node.specs[0], node.attrs, i, count) for i in places)

    def _choose_layouts_without_factor(self, node: Node) -> tuple[tuple[FactorLayout, ...], FactorLayout]:
        """Choose the operand layouts and the result layout of a node that no factor shards.

        Partial sums stay if the op is linear in them, all their readers pass them on, and the results are not larger.
        Otherwise every device computes the whole node. Rules 5 and 7.
        """
        layouts, named = self.assignment.produced_layouts, list_present_operands_by_name(node)
        partial = {s for s in node.inputs if layouts[s].is_partial and not self._is_converted_to_layout(s, REPLICATE)}
        whole = tuple(REPLICATE for _ in named)
        if not partial or not all(
            self._can_pass_on_partial_sum(user, s) for s in partial for user in self.users_of_value[s]
        ):
            return whole, REPLICATE
        if max(v.spec.nbytes for v in node.results) > max(s.spec.nbytes for s in partial):
            return whole, REPLICATE
        if (routed := self._find_common_routed_layout(node, partial)) is not None:
            return tuple(routed if s in partial else REPLICATE for _, s in named), routed
        for joint in op_of(node).linear_operands(node.attrs):
            together = joint.split("+")
            if {n for n, s in named if s in partial} <= set(together):
                partial_layouts = {s: layouts[s] if layouts[s].is_partial else PARTIAL for s in node.inputs}
                return tuple(partial_layouts[s] if n in together else REPLICATE for n, s in named), PARTIAL
        return whole, REPLICATE

    def _find_common_routed_layout(self, node: Node, partial_operands: set[Value]) -> TableLookupPartial | None:
        """Find the routed layout that all partial operands of a node share and that its result keeps, or None."""
        routed, *others = {self.assignment.produced_layouts[s] for s in partial_operands}
        if (
            others
            or not isinstance(routed, TableLookupPartial)
            or not all(self._is_result_routed_like_operand(node, s, routed) for s in partial_operands)
        ):
            return None
        names = {n for n, s in list_present_operands_by_name(node) if s in partial_operands}
        return (
            routed
            if any(names >= set(j.split("+")) for j in op_of(node).zero_preserving_operands(node.attrs))
            else None
        )

    def _can_pass_on_partial_sum(self, reader_node: Node, value: Value) -> bool:
        """Return whether a node can read `value` as a partial sum over devices, and give a partial sum as result."""
        if reader_node in self.pins.nodes or value in self.early_sums:
            return False
        declared, layout = op_of(reader_node), self.assignment.produced_layouts[value]
        passing = declared.linear_operands(reader_node.attrs)
        if isinstance(layout, TableLookupPartial) and self._is_result_routed_like_operand(reader_node, value, layout):
            if (
                layout.factor is self.factors.find_factor_roles(reader_node).indexed_factor
                and find_table_rows_and_added_operands(reader_node)[1] == layout.index_operand
            ):
                return value not in self.final_values
            passing = declared.zero_preserving_operands(reader_node.attrs)
        names = {n for joint in passing for n in joint.split("+")}
        places = [n for n, s in list_present_operands_by_name(reader_node) if s == value]
        others = [s for s in reader_node.inputs if s != value]
        has_sharded_operand = any(self._is_weight_or_state(s) and self._list_chosen_factors(s) for s in others)
        return value not in self.final_values and len(places) == 1 and places[0] in names and not has_sharded_operand

    def _add_missing_conversions(self, value: Value, target_layout: FactorLayout, reader_node: Node | None) -> None:
        """Add the conversions of `value` to `target_layout` that `reader_node` needs and that do not exist yet."""
        source_layout = self.assignment.produced_layouts[value]
        if not find_conversion_path(source_layout, target_layout) or self._is_converted_to_layout(value, target_layout):
            return
        if self._is_converted_to_layout(value, REPLICATE):
            source_layout = REPLICATE
        for state in find_conversion_path(source_layout, target_layout):
            if not self._is_converted_to_layout(value, state):
                self._record_conversion(LayoutConversion(value, source_layout, state, reader_node))
            source_layout = state

    def _is_converted_to_layout(self, value: Value, layout: FactorLayout) -> bool:
        """Return whether the conversions so far already give `value` in this layout."""
        return (value, layout) in self.converted_layouts

    def _is_weight_or_state(self, value: Value) -> bool:
        """Return whether `value` is a weight, a state or a view of one, so that its shards save stored bytes."""
        return value in self.stored_values

    def _record_conversion(self, conversion: LayoutConversion) -> None:
        self.converted_layouts.add((conversion.value, conversion.target_layout))
        self.assignment.conversions.append(conversion)
