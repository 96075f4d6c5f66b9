"""A PyTorch program after its import into hocket: its graph, its weights, and calls with tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from ...graph import Graph
from ...graph.errors import format_count
from ..errors import ModelError
from ..tensors.call_signature import ProgramArgument, ProgramResult
from ..tensors.tensor import limit_shape_to_max_rank
from .array_views import as_torch_tensor, view_tensor_as_array

if TYPE_CHECKING:
    from ...scheduler import Executor, Plan


@dataclass(frozen=True, eq=False)
class Program:
    """An imported PyTorch program: its graph, its weights by name, and its arguments and results in order.

    `graph` is planned and run like any other graph. `weights` also has the initial values of states. `on` loads the
    program on devices, for calls with tensors.
    """

    graph: Graph
    weights: Mapping[str, npt.NDArray[Any]]
    arguments: tuple[ProgramArgument, ...]
    results: tuple[ProgramResult, ...]
    mutated_arguments: tuple[tuple[int, str], ...]
    """Pairs of an argument index and an output name: a call copies the output into the argument."""
    in_spec: Any
    out_spec: Any
    bound_arguments: tuple[tuple[int, str], ...] = ()
    """Pairs of an argument index and a weight name: the argument is bound to memory instead of copied at each call."""

    def on(self, devices: str | Sequence[str] = "cpu:0", **options: Any) -> Runner:
        """Plan the program for devices and load it; `options` are the options of `hocket.plan`."""
        from ...scheduler import plan

        return Runner(self, plan(self.graph, devices, **options))

    def inputs(self, *args: Any, **kwargs: Any) -> dict[str, npt.NDArray[Any]]:
        """Return the graph inputs by name for the arguments of a call.

        Raises:
            ModelError: The arguments do not match the arguments of the export.
        """
        return self.as_graph_inputs(self.flatten_arguments(args, kwargs))

    def flatten_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Flatten the arguments of a call to a list in the order of `arguments`.

        Nested lists, tuples and dicts are unpacked, as by pytrees of PyTorch.

        Raises:
            ModelError: The arguments have other keywords or another pytree structure than in the export.
        """
        from torch.utils._pytree import tree_flatten

        if self.in_spec is None:
            return list(args)
        children = self.in_spec.children() if callable(self.in_spec.children) else self.in_spec.children_specs
        keywords = list(children[1].context or ())
        if set(keywords) != set(kwargs):
            raise ModelError(f"keywords are {sorted(kwargs)}; the program was exported with {sorted(keywords)}")
        flat, spec = tree_flatten((tuple(args), {k: kwargs[k] for k in keywords}))
        if spec != self.in_spec:
            raise ModelError(f"the arguments are built as {spec}; the program was exported with {self.in_spec}")
        return flat

    def _format_argument_path(self, number: int) -> str:
        """Return the place of a flattened argument in a call, such as ``use_cache`` or ``args[0][1]``."""
        from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

        if self.in_spec is None:
            return f"argument {number}"
        paths, _ = tree_flatten_with_path(tree_unflatten(list(range(len(self.arguments))), self.in_spec))
        path = keystr(paths[number][0])  # such as ``[0][1]`` and ``[1]['use_cache']``
        return f"args{path[3:]}" if path.startswith("[0]") else path[5:].replace("']", "", 1)

    @cached_property
    def _arguments_copied_to_inputs(self) -> list[tuple[int, ProgramArgument]]:
        """The arguments that are copied into graph inputs at each call, as pairs of index and argument."""
        operands = {number for number, _ in self.bound_arguments}
        return [(number, argument) for number, argument in enumerate(self.arguments) if number not in operands]

    @cached_property
    def _input_names(self) -> frozenset[str]:
        """The names of the graph inputs."""
        return frozenset(value.node.name for value in self.graph.inputs)

    def as_graph_inputs(self, flat: Sequence[Any]) -> dict[str, npt.NDArray[Any]]:
        """Return the graph inputs by name for flattened arguments.

        Raises:
            ModelError: An argument has another dtype, shape or constant value than in the export.
        """
        if len(flat) != len(self.arguments):
            raise ModelError(f"got {format_count(len(flat), 'argument')}; the program takes {len(self.arguments)}")
        arrays = {}
        for number, argument in self._arguments_copied_to_inputs:
            value = flat[number]
            if not argument.name:
                if value != argument.constant_value:
                    raise ModelError(
                        f"{self._format_argument_path(number)} is {value!r}; the program was exported for "
                        f"{argument.constant_value!r}"
                    )
                continue
            dtype = str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")
            shape = tuple(getattr(value, "shape", ()))
            if (dtype, shape) != (argument.dtype, argument.shape):
                expected = f"{argument.dtype}{list(argument.shape)}"
                raise ModelError(f"%{argument.name} is {dtype}{list(shape)}; the program takes {expected}")
            if argument.name in self._input_names:
                arrays[argument.name] = view_tensor_as_array(value, argument.name)
        return arrays


class Runner:
    """A PyTorch program that is loaded on devices. A call takes the arguments of the model and returns its results."""

    def __init__(self, program: Program, plan: Plan, executor: Executor | None = None) -> None:
        from ...scheduler import load

        self.program, self.plan = program, plan
        self.executor = load(plan, program.weights) if executor is None else executor
        for value in program.graph.states:
            self.executor.store.state(value.node.name)[...] = program.weights[value.node.name]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from torch.utils._pytree import tree_unflatten

        program = self.program
        flat = self.run_flat_arguments(program.flatten_arguments(args, kwargs))
        return tree_unflatten(flat, program.out_spec)

    def run_flat_arguments(self, arguments: Sequence[Any]) -> list[Any]:
        """Run the program on a flat list of arguments, and return the flat list of results.

        Arguments that the program changes in place are overwritten with their new values.
        """
        import torch

        program = self.program
        outputs = self.executor.run(
            {k: v.reshape(limit_shape_to_max_rank(v.shape)) for k, v in program.as_graph_inputs(arguments).items()}
        )
        tensors = {r.name: as_torch_tensor(outputs[r.name], r.shape, r.dtype) for r in program.results if r.name}
        with torch.no_grad():
            for number, name in program.mutated_arguments:
                argument = program.arguments[number]
                arguments[number].copy_(as_torch_tensor(outputs[name], argument.shape, argument.dtype))
        return [tensors[r.name] if r.name else r.constant_value for r in program.results]
