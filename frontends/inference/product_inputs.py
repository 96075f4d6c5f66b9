"""Sums of squares of the inputs of weight products, for each column of a weight, as outputs of step graphs.

The products are found in the graph, so that no table of tensor names is needed. The sums are graph nodes: they run on
the devices of the products, and only one number per column leaves a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from math import prod

import numpy as np

from ... import ops
from ...backends.base import Array
from ...graph import Graph, Value, constant
from ...graph.dtypes import DType
from ...graph.lazy_dataclass import dataclass
from ..errors import ModelError
from .prefill_chunks import F32
from .value_watch import StepWatch

PRODUCT_OPS = ("mul_mat", "mul_mat_id")
"""Ops that multiply a weight, their first operand, by activations, their second operand."""
VIEW_OPS = ("reshape", "slice", "cast")
"""Ops through which a product may read a weight."""
SeeSums = Callable[[str, F32, F32], object]
"""Called with the name of a weight, the sums of squares [matrices, columns], and the input rows, [matrices] or [1].

A weight with several matrices that read equally many rows has one number of rows.
"""


@dataclass(frozen=True, slots=True)
class WeightProduct:
    """A product of a weight with activations.

    The activations are multiplied by all matrices of the weight, or by the experts that are chosen for them.

    - `name`: the name of the weight.
    - `matrices`: the number of its matrices.
    - `x`: the activations [..., rows, columns].
    - `ids`: the chosen experts, i32[..., experts per row]; None for a product with all matrices.
    """

    name: str
    matrices: int
    x: Value
    ids: Value | None


def find_distinct_weight_products(graph: Graph) -> Iterator[WeightProduct]:
    """Yield each product of the graph that reads a weight; parts of a weight with the same input count once."""
    known = set()
    for node in graph.nodes:
        if node.op not in PRODUCT_OPS:
            continue
        w, x, *others = node.inputs
        ids = others[0] if others else None
        leaf = _find_weight_viewed_with_same_columns(w)
        if leaf is None or (leaf, x, ids) in known:
            continue
        known.add((leaf, x, ids))
        matrices = prod(leaf.shape[:-2])
        if ids is None and prod(w.shape[:-2]) != matrices:
            matrices = 1  # a matrix that is read as several parts, each with its own rows
        if w.shape[0] == matrices if ids is not None else prod(x.shape[:-2]) % matrices == 0:
            yield WeightProduct(leaf.node.name, matrices, x, ids)


def _find_weight_viewed_with_same_columns(value: Value) -> Value | None:
    """Return the weight that a value is a view of, with the same columns; None for another value."""
    columns = value.shape[-1]
    while value.node.op in VIEW_OPS and value.node.inputs[0].shape[-1:] == (columns,):
        value = value.node.inputs[0]
    return value if value.node.op == "weight" else None


def build_input_energy_sums_and_row_counts(product: WeightProduct) -> tuple[Value, Value | int]:
    """Build the sums of the squared inputs of a product, by matrix and column, and the number of summed rows.

    The sums are f32[matrices, columns]. For chosen experts the number is f32[matrices, 1], because each expert gets
    other rows. Otherwise it is one integer for all matrices.
    """
    x, columns = product.x, product.x.shape[-1]
    energy = ops.sqr(x if x.dtype is DType.F32 else ops.cast(x, dtype=DType.F32))
    if product.ids is None:
        if len(x.shape) > 3 and product.matrices > 1:  # [sequences, matrices, rows, columns]
            energy = ops.permute(energy, axes=(1, 0, *range(2, len(x.shape))))
        rows = x.spec.size // columns // product.matrices
        energy = ops.reshape(energy, shape=(product.matrices, rows, columns))
        sums = ops.sum_rows(ops.transpose(energy))
        return ops.reshape(sums, shape=(product.matrices, columns)), rows
    used, inputs = product.ids.shape[-1], x.shape[-2]
    tokens = product.ids.spec.size // used
    flat = ops.reshape(product.ids, shape=(tokens * used,))
    chosen = ops.get_rows(_make_identity(product.matrices), flat)
    # An input row may serve several experts of its token: input i serves experts i, i + inputs, ...
    chosen = ops.reshape(chosen, shape=(tokens, used // inputs, inputs * product.matrices))
    chosen = ops.reshape(ops.sum_rows(ops.transpose(chosen)), shape=(tokens * inputs, product.matrices))
    chosen = ops.transpose(chosen)
    energy = ops.reshape(energy, shape=(tokens * inputs, columns))
    return ops.mul_mat(ops.transpose(energy), chosen), ops.sum_rows(chosen)


@cache
def _make_identity(size: int) -> Value:
    return constant(f"identity.{size}", np.eye(size, dtype=np.float32))


class InputEnergyReporter(StepWatch):
    """Passes the sums of squares of all selected products to a function after each step.

    Args:
        selects: Returns whether the weight with a name is observed.
        see: Receives the sums of each product.
    """

    def __init__(self, selects: Callable[[str], bool], see: SeeSums) -> None:
        self._selects, self._see = selects, see

    def _select_products(self, graph: Graph) -> list[WeightProduct]:
        return [p for p in find_distinct_weight_products(graph) if self._selects(p.name)]

    def require_watched_values(self, graph: Graph) -> None:
        """Require that the graph has at least one selected product.

        Raises:
            ModelError: It has none.
        """
        if not self._select_products(graph):
            raise ModelError("the model has no product that reads a weight of a block; it needs no importance matrix")

    def add_watched_outputs(self, graph: Graph) -> Graph:
        """Return the graph with the sums of all selected products as additional outputs."""
        from ...scheduler import with_observed_values

        values: dict[str, Value] = {}
        known: dict[tuple[int, Value, Value | None], tuple[Value, Value | int]] = {}
        for i, product in enumerate(self._select_products(graph)):
            key = (product.matrices, product.x, product.ids)
            if key not in known:  # several weights read one input
                known[key] = build_input_energy_sums_and_row_counts(product)
            sums, rows = known[key]
            values[_WatchedOutputName(product.name, i, rows if isinstance(rows, int) else 0).text] = sums
            if not isinstance(rows, int):
                values[_WatchedOutputName(product.name, i, -1).text] = rows
        return with_observed_values(graph, values)

    def pass_on_step_outputs(self, outputs: Mapping[str, Array], first_position: int, token_count: int) -> None:
        """Call `see` with the sums and the row counts of each product of a step; the positions have no effect."""
        from ...scheduler import select_observed_outputs

        observed = {_WatchedOutputName.parse(name): array for name, array in select_observed_outputs(outputs).items()}
        for label, sums in observed.items():
            if label.rows > 0:
                self._see(label.name, sums, np.array([label.rows], np.float32))
            elif label.rows == 0:
                self._see(label.name, sums, observed[_WatchedOutputName(label.name, label.number, -1)].reshape(-1))


@dataclass(frozen=True, slots=True)
class _WatchedOutputName:
    """The parts of the name of an observed output.

    They are the weight, the number of the product, and the number of summed rows. Chosen experts have two outputs:
    `rows` is 0 for their sums, and -1 for their row counts.
    """

    name: str
    number: int
    rows: int

    @property
    def text(self) -> str:
        return f"{self.name}#{self.number}#{self.rows}"

    @classmethod
    def parse(cls, text: str) -> _WatchedOutputName:
        name, number, rows = text.rsplit("#", 2)
        return cls(name, int(number), int(rows))
