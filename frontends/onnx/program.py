"""An ONNX model after its import into hocket: its graph, its weights, and calls with arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...graph import Graph
from ..errors import ModelError
from ..tensors.call_signature import ProgramArgument, ProgramResult
from ..tensors.tensor import limit_shape_to_max_rank

if TYPE_CHECKING:
    from ...scheduler import Plan


@dataclass(frozen=True, eq=False)
class Program:
    """An imported ONNX model: its graph, its weights by name, and its inputs and outputs in order.

    `graph` is planned and run like any other graph. `on` loads the model on devices, for calls with arrays.
    """

    graph: Graph
    weights: Mapping[str, npt.NDArray[Any]]
    arguments: tuple[ProgramArgument, ...]
    results: tuple[ProgramResult, ...]

    def on(self, devices: str | Sequence[str] = "cpu:0", **options: Any) -> Runner:
        """Plan the program for devices and load it; `options` are the options of `hocket.plan`."""
        from ...scheduler import plan

        return Runner(self, plan(self.graph, devices, **options))

    def inputs(self, *args: npt.ArrayLike, **kwargs: npt.ArrayLike) -> dict[str, npt.NDArray[Any]]:
        """Return the graph inputs by name for model inputs that are given in order or by name.

        Raises:
            ModelError: An array is missing or unknown, or has another dtype or shape than in the model.
        """
        names = [argument.name for argument in self.arguments]
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        if len(args) > len(names) or set(arguments) != set(names) or len(arguments) != len(args) + len(kwargs):
            raise ModelError(
                f"got {len(args)} arrays and {sorted(kwargs)}; the model takes {', '.join(names) or 'none'}"
            )
        read = {value.node.name for value in self.graph.inputs}
        arrays = {}
        for argument in self.arguments:
            array = np.asarray(arguments[argument.name])
            if (array.dtype.name, array.shape) != (argument.dtype, argument.shape):
                expected = f"{argument.dtype}{list(argument.shape)}"
                raise ModelError(
                    f"%{argument.name} is {array.dtype.name}{list(array.shape)}; the model takes {expected}"
                )
            if argument.name in read:
                arrays[argument.name] = convert_bool_and_bf16_for_graph(array).reshape(
                    limit_shape_to_max_rank(array.shape)
                )
        return arrays


def convert_bool_and_bf16_for_graph(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array in the dtype of its graph value: bool as 0 and 1 in f32, bfloat16 as its bits in uint16."""
    if array.dtype == np.bool_:
        return array.astype(np.float32)
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


class Runner:
    """An ONNX model that is loaded on devices; a call takes the input arrays and returns the list of output arrays."""

    def __init__(self, program: Program, plan: Plan) -> None:
        from ...scheduler import load

        self.program, self.plan = program, plan
        self.executor = load(plan, program.weights)

    def __call__(self, *args: npt.ArrayLike, **kwargs: npt.ArrayLike) -> list[npt.NDArray[Any]]:
        outputs = self.executor.run(self.program.inputs(*args, **kwargs))
        return [_as_model_output(outputs[result.name], result) for result in self.program.results]


def _as_model_output(array: npt.NDArray[Any], result: ProgramResult) -> npt.NDArray[Any]:
    """Convert a graph output to the dtype and the shape of the model output."""
    if result.dtype == "bfloat16":
        import ml_dtypes

        kind: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        bits = array.dtype == np.uint16
        return np.ascontiguousarray(array).view(kind).reshape(result.shape) if bits else array.astype(kind)
    return np.ascontiguousarray(array).reshape(result.shape).astype(result.dtype)
