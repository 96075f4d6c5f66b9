"""Comparison of every value of a run with the result of the same node on a reference device.

Errors of an early node reach all later nodes, so a comparison of two complete runs does not locate the fault. Therefore
the reference device computes each node alone, from the operands that the compared devices had:

1. Split the graph into portions, because its values and weights may not fit into memory at once.
2. Run the plan with the values of a portion as further outputs, the observed values.
3. Compute each value of the portion on the reference device from the observed operands.
4. Yield the difference of each value. A difference above the limit is an error of this node.
5. Run the plan without observed values, in order to find faults of fused kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ...backends.base import BACKEND_KIND, Array, Backend, Device
from ...backends.capabilities import DeclaresTolerance
from ...graph.errors import PlanError
from ...graph.graph import Graph
from ...graph.node import Node, Value, input
from ...graph.validation import ANY, TEXT, instance_of, integer_between, mapping_of, pair_of, validate_arguments
from ...ops import op_of
from ...ops.text import dump
from ..ir.execution_plan import PLAN_ARGUMENT_KINDS, PLAN_KIND, Plan
from ..planning.planner import plan_for_group
from ..runtime.executor import Executor
from ..runtime.store import Store
from .observe_values import collect_computed_values, select_observed_outputs, with_observed_values

MAX_PORTION_BYTES = 1 << 28
"""The largest number of float64 bytes of the values and weights of a portion; a single node may need more."""
ROUNDING_ERROR_FACTOR = 8.0
"""The allowed error of a row, as a multiple of the relative error that a backend declares for its arithmetic."""
MIN_TOLERANCE = 1e-4
"""The smallest allowed error of a row, relative to its norm. It holds for float32 arithmetic without a declaration."""
DeviceCopies = Mapping[str, list[Array]]
"""Arrays by value name, with one array from each device that has the whole value."""
MIN_ROW_NORM_SHARE = 1e-3
"""The smallest row norm for relative errors, as a share of the root mean square of all row norms."""

MAX_NODE_CHARACTERS = 300
"""The largest number of characters that are printed of a node."""


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """The difference between a value that the devices computed and its reference.

    - `graph`, `name`, `node`: the graph, and the name and the node of the value.
    - `error`: the largest relative error of a row along the last axis. It is the norm of the difference divided by the
      norm of the reference.
    - `limit`: the largest allowed error.
    - `index`: the position of the entry with the largest absolute difference.
    - `actual`, `expected`: this entry in the computed value and in the reference.
    """

    graph: Graph
    name: str
    node: Node
    error: float
    limit: float
    index: tuple[int, ...]
    actual: float
    expected: float

    @property
    def is_wrong(self) -> bool:
        """Whether the error is NaN or larger than the limit."""
        return not self.error <= self.limit

    @property
    def error_over_limit(self) -> float:
        """The error divided by the allowed error `limit`; if the limit is 0, the error itself."""
        return self.error / self.limit if self.limit else self.error

    @property
    def surrounding_lines(self) -> str:
        """The lines of the graph text near the node, for messages."""
        return format_surrounding_nodes(self.graph, self.node)

    def __str__(self) -> str:
        at = ",".join(map(str, self.index))
        return (
            f"%{self.name} = {self.node.op}: {self.error:.2g} of its norm off, {self.limit:.2g} allowed; "
            f"at [{at}] {self.actual:.9g} instead of {self.expected:.9g}"
        )


class NodeComparer:
    """Compares each value that a plan computes on its devices with the value that a reference device computes.

    The reference device receives the operands that were observed on the devices. So the error of each node is seen
    alone.
    """

    plan: Plan
    store: Store
    weights: Mapping[str, npt.ArrayLike]
    reference_device: tuple[Backend, Device]
    placement_rules: Sequence[tuple[str, str]]

    @validate_arguments(
        PlanError,
        plan=PLAN_KIND,
        store=instance_of(Store),
        weights=instance_of(Mapping),
        other=pair_of(BACKEND_KIND, instance_of(Device)),
        place=PLAN_ARGUMENT_KINDS["place"],
    )
    def __init__(
        self,
        plan: Plan,
        store: Store,
        weights: Mapping[str, npt.ArrayLike],
        other: tuple[Backend, Device],
        *,
        place: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Split the graph of the plan into portions.

        Args:
            plan: The plan to compare.
            store: Weights and states of the devices of the plan.
            weights: Arrays by name in the format of the model file. Each array is read when a portion needs it.
            other: The backend and the device that compute the references.
            place: The placement rules of the plan, for the plans of the portions.
        """
        self.plan, self.store, self.weights, self.reference_device, self.placement_rules = (
            plan,
            store,
            weights,
            other,
            place,
        )
        self.values: Mapping[str, Value] = collect_computed_values(plan.graph)
        self._portions = [
            (names, *self._build_observed_and_reference_graphs(names))
            for names in _split_graph_into_portions(plan.graph)
        ]

    @validate_arguments(PlanError, inputs=mapping_of(TEXT, ANY, "a mapping from names of inputs to arrays"))
    def compare_step_values_with_reference(self, inputs: Mapping[str, npt.ArrayLike]) -> Iterator[ValueDifference]:
        """Run one step of the plan, and yield the difference between each computed value and its reference.

        The differences are in graph order; outputs come last. Outputs are from a run without observed values, and their
        limit is the largest limit of all values. The states advance only after the caller has asked for all
        differences.
        """
        plain = Executor(self.plan, self.store)
        before = {v.node.name: np.array(self.store.state(v.node.name)) for v in self.plan.graph.states}
        outputs: DeviceCopies = {}
        seen: DeviceCopies = {}
        agree = True
        for names, graph, isolated in self._portions:
            outputs = self._run_observed_graph(graph, inputs, before)
            seen = select_observed_outputs(outputs)
            expected = self._compute_expected_values(
                isolated, {**inputs, **{name: copies[0] for name, copies in seen.items()}}, before
            )
            for name in names:
                yield (found := self._compute_difference(name, seen[name], expected[name]))
                agree = agree and not found.is_wrong
        self._restore_states(before)
        loosest = max(
            (self._compute_allowed_relative_error(self.values[name]) for names, *_ in self._portions for name in names),
            default=MIN_TOLERANCE,
        )
        for name in plain.run(inputs):
            own = next((n for n, v in self.values.items() if v == self.plan.graph.outputs[name]), None)
            if own is not None:
                unseen = replace(
                    self._compute_difference(own, plain.read_output_copies(name), outputs[name][0]), limit=loosest
                )
                if unseen.is_wrong and agree and len(self._portions) == 1:
                    unseen = self._find_first_value_wrong_when_fused(inputs, before, seen, loosest) or unseen
                yield unseen

    def _find_first_value_wrong_when_fused(
        self, inputs: Mapping[str, npt.ArrayLike], before: Mapping[str, Array], seen: DeviceCopies, limit: float
    ) -> ValueDifference | None:
        """Find by bisection the first value that is wrong only if its node is fused with others in one kernel, or None.

        Backends do not fuse across a value that is observed, so a run in which all values are observed has no fused
        kernels. A run that observes a single value keeps the fusion before it. The value is wrong if both runs
        differ.

        Args:
            inputs: The inputs of the step.
            before: The states before the step.
            seen: The values of the run in which all were observed.
            limit: The largest allowed error.
        """

        def observe_alone(name: str) -> ValueDifference:
            graph = with_observed_values(self.plan.graph, {name: self.values[name]})
            got = select_observed_outputs(self._run_observed_graph(graph, inputs, before))[name]
            return replace(self._compute_difference(name, got, seen[name][0]), limit=limit)

        ((names, *_),) = self._portions
        low, high = 0, len(names) - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if observe_alone(names[middle]).is_wrong else (middle + 1, high)
        found = observe_alone(names[low])
        return found if found.is_wrong else None

    def _run_observed_graph(
        self, graph: Graph, inputs: Mapping[str, npt.ArrayLike], before: Mapping[str, Array]
    ) -> DeviceCopies:
        """Plan and run a graph with observed values once, and return each output as it is on each device.

        Args:
            graph: The graph, with the observed values as further outputs.
            inputs: The inputs of the step.
            before: The states before the step.
        """
        self._restore_states(before)
        run = Executor(plan_for_group(graph, self.plan.group, place=self.placement_rules, like=self.plan), self.store)
        return {name: run.read_output_copies(name) for name in run.run(inputs)}

    def _restore_states(self, before: Mapping[str, Array]) -> None:
        for name, array in before.items():
            self.store.state(name)[...] = array

    def _build_observed_and_reference_graphs(self, names: Sequence[str]) -> tuple[Graph, Graph]:
        """Build the graph that outputs some values on the devices, and the graph that recomputes each of them alone.

        Args:
            names: The names of the values.

        Returns:
            The graph of the plan, with these values and their operands as further outputs. A graph that computes each
            of the values from its operands alone. The operands are inputs of equal name.
        """
        graph = self.plan.graph
        known = {value: name for name, value in self.values.items()}
        asked = frozenset(names)
        outputs: dict[str, Value] = {}
        became: dict[Value, Value] = {}
        for node in graph.nodes:
            if node.is_leaf:
                became[node.results[0]] = node.results[0]
                continue
            copy = node.with_src(tuple(None if s is None else became[s] for s in node.src))
            for old, value in zip(node.results, copy.results, strict=True):
                if known[old] in asked:
                    outputs[known[old]] = value
                became[old] = value if op_of(node).is_view else input(known[old], old.shape, old.dtype)
        isolated = Graph(outputs)
        read = {v.node.name for v in isolated.inputs}
        values = {name: value for value, name in known.items() if name in asked or name in read}
        return with_observed_values(graph, values), isolated

    def _compute_expected_values(
        self, graph: Graph, inputs: Mapping[str, npt.ArrayLike], states: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Compute the reference of each value of a portion (a part of the graph) on the reference device.

        Args:
            graph: A graph of the portion, in which the operands from outside are inputs.
            inputs: The operands, as observed on the devices.
            states: The states before the step.
        """
        plan = plan_for_group(graph, [self.reference_device])
        store = Store([self.reference_device])
        for value in graph.weights:
            store.bind(value.node.name, self.weights[value.node.name], value.spec)
        run = Executor(plan, store)
        for value in graph.states:
            store.state(value.node.name)[...] = states[value.node.name]
        return run.run({v.node.name: inputs[v.node.name] for v in graph.inputs})

    def _compute_difference(self, name: str, copies: Sequence[Array], expected: Array) -> ValueDifference:
        """Return the difference between a value and its reference.

        Args:
            name: The name of the value.
            copies: The value on each device that has it; the worst of them counts.
            expected: The reference.
        """
        value, limit = self.values[name], self._compute_allowed_relative_error(self.values[name])
        error, at, worst = max(
            ((*_find_worst_row_error_and_entry(copy, expected), copy) for copy in copies), key=lambda scored: scored[0]
        )
        return ValueDifference(
            self.plan.graph, name, value.node, error, limit, at, float(worst[at]), float(expected[at])
        )

    def _compute_allowed_relative_error(self, value: Value) -> float:
        """Return the largest allowed relative error of a value; it is 0 for integers.

        For floats it is a multiple of the largest rounding error that a backend declares for the node.
        """
        if value.dtype.is_integer:
            return 0.0
        backends = {device_plan.backend for device_plan in self.plan.device_plans} | {self.reference_device[0]}
        tolerances = [b.tolerance(value.node) or 0.0 for b in backends if isinstance(b, DeclaresTolerance)]
        return max([MIN_TOLERANCE, *(ROUNDING_ERROR_FACTOR * tolerance for tolerance in tolerances)])


def _split_graph_into_portions(graph: Graph) -> list[list[str]]:
    """Split the computed values of a graph into portions, to be observed in one run each; return their value names.

    The values and operands of a portion have at most `MAX_PORTION_BYTES` bytes. Views and empty values are omitted,
    because nothing is computed for them.
    """
    portions: list[list[str]] = [[]]
    counted, free_bytes = set[Value](), MAX_PORTION_BYTES
    for name, value in collect_computed_values(graph).items():
        if op_of(value.node).is_view or not value.spec.size:
            continue
        needed = {value, *value.node.inputs} - counted
        nbytes = sum(8 * v.spec.size for v in needed)
        if nbytes > free_bytes and portions[-1]:
            portions.append([])
            counted, free_bytes = set(), MAX_PORTION_BYTES
            nbytes = sum(8 * v.spec.size for v in {value, *value.node.inputs})
        counted |= needed
        free_bytes -= nbytes
        portions[-1].append(name)
    return [names for names in portions if names]


def _find_worst_row_error_and_entry(actual: Array, expected: Array) -> tuple[float, tuple[int, ...]]:
    """Return the largest relative error of a row, and the index of the entry with the largest absolute difference.

    A row is along the last axis. Its error is the norm of the difference divided by the norm of the expected row. Equal
    infinities count as equal, and so does NaN in both arrays. NaN in only one array is an infinite difference.
    """
    actual, expected = (np.asarray(x).astype(np.float64) for x in (actual, expected))
    with np.errstate(all="ignore"):
        difference = np.abs(actual - expected)
        same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    difference[same] = 0.0
    difference[np.isnan(difference)] = np.inf
    index = np.unravel_index(int(difference.argmax()), difference.shape) if difference.ndim else ()
    finite = np.where(np.isfinite(expected), expected, 0.0)
    norms = np.sqrt((np.atleast_1d(finite) ** 2).sum(-1))
    floor = max(MIN_ROW_NORM_SHARE * float(np.sqrt((norms**2).mean())), float(np.finfo(np.float32).tiny))
    errors = np.sqrt((np.atleast_1d(difference) ** 2).sum(-1)) / np.maximum(norms, floor)
    return float(errors.max()), tuple(int(i) for i in index)


@validate_arguments(PlanError, graph=instance_of(Graph), node=instance_of(Node), reach=integer_between(0))
def format_surrounding_nodes(graph: Graph, node: Node, reach: int = 2) -> str:
    """Return the lines of the graph text near a node, with ``>`` before the line of the node.

    Args:
        graph: The graph of the node.
        node: The marked node.
        reach: The number of steps back from the node through operands. Direct readers of the node are printed too.
    """
    if node not in graph.nodes:
        raise PlanError(f"the graph does not have the node {node!r:.{MAX_NODE_CHARACTERS}}")
    printed, edge = {node}, {node}
    for _ in range(reach):
        edge = {s.node for n in edge for s in n.inputs}
        printed |= edge
    users = graph.users()
    printed |= {user for value in node.results for user in users[value]}
    lines = zip(graph.nodes, dump(graph).splitlines(), strict=False)  # outputs and updates follow
    return "\n".join(f"{'>' if n is node else ' '} {line:.{MAX_NODE_CHARACTERS}}" for n, line in lines if n in printed)
