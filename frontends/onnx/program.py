"""An ONNX model as hocket has it: its graph, its weights, and how it is called with arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...graph import Graph
from ..errors import ModelError
from ..tensors.call_signature import ProgramArgument, ProgramResult
from ..tensors.tensor import stored_shape

if TYPE_CHECKING:
    from ...scheduler import Plan


@dataclass(frozen=True, eq=False)
class Program:
    """`graph` is planned and run like any other; `weights` are the arrays that it is loaded with, by name.

    `on` is the shortest way to call it with arrays.  `arguments` and `results` are the model's inputs and outputs.
    """

    graph: Graph
    weights: Mapping[str, npt.NDArray[Any]]
    arguments: tuple[ProgramArgument, ...]
    results: tuple[ProgramResult, ...]

    def on(self, devices: str | Sequence[str] = "cpu:0", **options: Any) -> Runner:
        """The program planned for devices and loaded; `options` are those of `hocket.plan`."""
        from ...scheduler import plan

        return Runner(self, plan(self.graph, devices, **options))

    def inputs(self, *args: npt.ArrayLike, **kwargs: npt.ArrayLike) -> dict[str, npt.NDArray[Any]]:
        """Arrays by name as the graph takes them, given in the model's order or by name.

        Raises `ModelError` for what does not fit.
        """
        names = [argument.name for argument in self.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if len(args) > len(names) or set(given) != set(names) or len(given) != len(args) + len(kwargs):
            raise ModelError(
                f"got {len(args)} arrays and {sorted(kwargs)}; the model takes {', '.join(names) or 'none'}"
            )
        read = {value.node.name for value in self.graph.inputs}
        arrays = {}
        for argument in self.arguments:
            array = np.asarray(given[argument.name])
            if (array.dtype.name, array.shape) != (argument.dtype, argument.shape):
                wanted = f"{argument.dtype}{list(argument.shape)}"
                raise ModelError(f"%{argument.name} is {array.dtype.name}{list(array.shape)}; the model takes {wanted}")
            if argument.name in read:
                arrays[argument.name] = stored(array).reshape(stored_shape(array.shape))
        return arrays


def stored(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """An array as a value holds it: truth values are 0 and 1 in f32, bfloat16 is its bits."""
    if array.dtype == np.bool_:
        return array.astype(np.float32)
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


class Runner:
    """A model on devices: called with arrays, it gives the list of arrays that the model gives."""

    def __init__(self, program: Program, plan: Plan) -> None:
        from ...scheduler import load

        self.program, self.plan = program, plan
        self.executor = load(plan, program.weights)

    def __call__(self, *args: npt.ArrayLike, **kwargs: npt.ArrayLike) -> list[npt.NDArray[Any]]:
        outputs = self.executor.run(self.program.inputs(*args, **kwargs))
        return [_returned(outputs[result.name], result) for result in self.program.results]


def _returned(array: npt.NDArray[Any], result: ProgramResult) -> npt.NDArray[Any]:
    """An output in the type and shape that the model says."""
    if result.dtype == "bfloat16":
        import ml_dtypes

        kind: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        bits = array.dtype == np.uint16
        return np.ascontiguousarray(array).view(kind).reshape(result.shape) if bits else array.astype(kind)
    return np.ascontiguousarray(array).reshape(result.shape).astype(result.dtype)
