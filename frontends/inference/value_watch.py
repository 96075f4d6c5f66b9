"""Observers of the steps of a session: watched values, values of another device, and times."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ...backends.base import Array, find_device
from ...graph import Graph, PlanError
from ...graph.lazy_dataclass import dataclass
from ...graph.old_names import make_module_getattr
from ...graph.validation import CALLABLE, TEXT, format_value, require
from ...scheduler import Statistics
from ...scheduler.ir.formatting import format_table
from ..errors import ModelError
from ..models import Model

if TYPE_CHECKING:
    from ...scheduler import Plan, Store, Trace, ValueDifference


@dataclass(frozen=True, slots=True)
class StepStatistics:
    """Statistics of the watched values of one step, by value name.

    The step ran `token_count` tokens; `first_position` is the position of the first one.
    """

    first_position: int
    token_count: int
    statistics: Mapping[str, Statistics]

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array], first_position: int, token_count: int) -> StepStatistics:
        """Compute the statistics of the arrays of a step; `first_position` is the position of its first token."""
        return cls(first_position, token_count, {name: Statistics.of(array) for name, array in arrays.items()})

    def format_lines(self) -> Iterator[str]:
        """Yield the lines of a table with one row per value."""
        last = self.first_position + self.token_count - 1
        where = f"token {self.first_position}" if self.token_count == 1 else f"tokens {self.first_position} to {last}"
        rows: list[tuple[str, ...]] = [(where, "shape", "min", "max", "mean", "norm", "NaN")]
        for name, s in self.statistics.items():
            numbers = (f"{x:.6g}" for x in (s.least, s.most, s.mean, s.norm))
            rows.append((f"%{name}", f"[{','.join(map(str, s.shape))}]", *numbers, str(s.nans)))
        yield from format_table(rows, "llrrrrr")


class StepWatch(ABC):
    """An observer of the steps of a session: it adds outputs to their graphs, and gets the outputs of each step.

    Steps have no padding, so that outputs contain real tokens only. An added output is gathered from all devices.
    """

    @abstractmethod
    def require_watched_values(self, graph: Graph) -> None:
        """Raise `ModelError` if the graph of a step has no value to observe; called before weights are loaded."""

    @abstractmethod
    def add_watched_outputs(self, graph: Graph) -> Graph:
        """Return the graph with the observed values as additional outputs."""

    @abstractmethod
    def pass_on_step_outputs(self, outputs: Mapping[str, Array], first_position: int, token_count: int) -> None:
        """Receive the outputs of a step.

        Args:
            outputs: The outputs by name, with the additional ones.
            first_position: The position of the first token of the step.
            token_count: The number of tokens of the step.
        """


@dataclass(frozen=True, slots=True)
class ValueWatch(StepWatch):
    """Watches graph values with names that match a regular expression, and reports their statistics after each step.

    A watched value is gathered from all devices. Steps have no padding, so that statistics do not count it. A fused
    kernel is split if a watched value is inside it.
    """

    pattern: str
    see: Callable[[StepStatistics], None]

    def __post_init__(self) -> None:
        require(ModelError, "ValueWatch", "pattern", self.pattern, TEXT)
        require(ModelError, "ValueWatch", "see", self.see, CALLABLE)

    def require_watched_values(self, graph: Graph) -> None:
        """Require that the name of at least one value of the graph matches the pattern.

        Raises:
            ModelError: No name matches, or the pattern is no regular expression.
        """
        from ...scheduler import select_matching_values

        try:
            select_matching_values(graph, self.pattern)
        except PlanError as why:
            raise ModelError(f"watch={format_value(self.pattern)}: {why}") from None

    def add_watched_outputs(self, graph: Graph) -> Graph:
        """Return the graph with all watched values as additional outputs."""
        from ...scheduler import select_matching_values, with_observed_values

        return with_observed_values(graph, select_matching_values(graph, self.pattern))

    def pass_on_step_outputs(self, outputs: Mapping[str, Array], first_position: int, token_count: int) -> None:
        """Call the callback `see` with the statistics of the watched values among the outputs of a step."""
        from ...scheduler import select_observed_outputs

        self.see(StepStatistics.from_arrays(select_observed_outputs(outputs), first_position, token_count))


if not TYPE_CHECKING:
    __getattr__ = make_module_getattr(globals(), Watch="ValueWatch")


def compare_values_with_device(
    store: Store,
    model: Model,
    plan: Plan,
    inputs: Mapping[str, Array],
    device: str,
    rules: Sequence[tuple[str, str]],
) -> Iterator[ValueDifference]:
    """Run a plan, and yield how each value differs on another device; see `Session.compare_with_device`.

    Args:
        store: The states and the weights of the plan.
        model: The model that has the weights.
        plan: The plan of a step.
        inputs: The inputs of the step.
        device: The name of the other device.
        rules: The placement rules of the plan.
    """
    from ...scheduler import NodeComparer

    raw = {name: tensor.stored_elements for name, tensor in model.tensors.items()}
    yield from NodeComparer(plan, store, raw, find_device(device), place=rules).compare_step_values_with_reference(
        inputs
    )


@contextmanager
def trace_runs(
    set_trace: Callable[[Trace | None], object], before: Trace | None, trace: Trace | None = None
) -> Iterator[Trace]:
    """Trace the runs in this context; see `Session.tracing`.

    Args:
        set_trace: Sets the trace of all following runs.
        before: The trace of the runs before and after this context, if any.
        trace: The trace; a new one if it is None.
    """
    from ...scheduler import Trace

    trace = trace or Trace()
    set_trace(trace)
    try:
        yield trace
    finally:
        set_trace(before)
