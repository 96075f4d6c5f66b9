"""A PyTorch program as hocket has it: its graph, its weights, and how it is called with tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...graph import Graph
from ..errors import ModelError
from ..tensors.call_signature import ProgramArgument, ProgramResult
from .arrays import array_of, tensor_of

if TYPE_CHECKING:
    from ...scheduler import Executor, Plan


@dataclass(frozen=True, eq=False)
class Program:
    """`graph` is planned and run like any other; `weights` are the arrays that it is loaded with, by name.

    Initial values of states are among them.  `on` is the shortest way to call it with tensors.
    """

    graph: Graph
    weights: Mapping[str, npt.NDArray[Any]]
    arguments: tuple[ProgramArgument, ...]
    results: tuple[ProgramResult, ...]
    written: tuple[tuple[int, str], ...]
    """Arguments, by number, into which a call writes an output, by name."""
    in_spec: Any
    out_spec: Any
    operands: tuple[tuple[int, str], ...] = ()
    """Arguments, by number, that are weights, by name: they are bound to memory instead of copied at each call."""

    def on(self, devices: str | Sequence[str] = "cpu:0", **options: Any) -> Runner:
        """The program planned for devices and loaded; `options` are those of `hocket.plan`."""
        from ...scheduler import plan

        return Runner(self, plan(self.graph, devices, **options))

    def inputs(self, *args: Any, **kwargs: Any) -> dict[str, npt.NDArray[Any]]:
        """Arrays by name for the arguments of a call.  Raises `ModelError` for what does not fit."""
        return self.named(self.flattened(args, kwargs))

    def flattened(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The leaves of the arguments of a call, in the order of `arguments`."""
        from torch.utils._pytree import tree_flatten

        if self.in_spec is None:
            return list(args)
        children = self.in_spec.children() if callable(self.in_spec.children) else self.in_spec.children_specs
        wanted = list(children[1].context or ())
        if set(wanted) != set(kwargs):
            raise ModelError(f"keywords are {sorted(kwargs)}; the program was exported with {sorted(wanted)}")
        flat, spec = tree_flatten((tuple(args), {k: kwargs[k] for k in wanted}))
        if spec != self.in_spec:
            raise ModelError(f"the arguments are built as {spec}; the program was exported with {self.in_spec}")
        return flat

    @cached_property
    def _copied_arguments(self) -> list[tuple[int, ProgramArgument]]:
        """The arguments that are not bound, by number."""
        operands = {number for number, _ in self.operands}
        return [(number, argument) for number, argument in enumerate(self.arguments) if number not in operands]

    @cached_property
    def _read(self) -> frozenset[str]:
        """The inputs of the graph, by name."""
        return frozenset(value.node.name for value in self.graph.inputs)

    def named(self, flat: Sequence[Any]) -> dict[str, npt.NDArray[Any]]:
        """Arrays by name for arguments that are flat already."""
        if len(flat) != len(self.arguments):
            raise ModelError(f"got {len(flat)} arguments; the program takes {len(self.arguments)}")
        arrays = {}
        for number, argument in self._copied_arguments:
            given = flat[number]
            if not argument.name:
                if given != argument.constant_value:
                    raise ModelError(
                        f"an argument is {given!r}; the program was exported for {argument.constant_value!r}"
                    )
                continue
            dtype = str(getattr(given, "dtype", type(given).__name__)).removeprefix("torch.")
            shape = tuple(getattr(given, "shape", ()))
            if (dtype, shape) != (argument.dtype, argument.shape):
                wanted = f"{argument.dtype}{list(argument.shape)}"
                raise ModelError(f"%{argument.name} is {dtype}{list(shape)}; the program takes {wanted}")
            if argument.name in self._read:
                arrays[argument.name] = array_of(given, argument.name)
        return arrays


class Runner:
    """A program on devices: called as the model was, with tensors, it gives what the model gave."""

    def __init__(self, program: Program, plan: Plan, executor: Executor | None = None) -> None:
        from ...scheduler import load

        self.program, self.plan = program, plan
        self.executor = load(plan, program.weights) if executor is None else executor
        for value in program.graph.states:
            self.executor.store.state(value.node.name)[...] = program.weights[value.node.name]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from torch.utils._pytree import tree_unflatten

        program = self.program
        flat = self.flat(program.flattened(args, kwargs))
        return tree_unflatten(flat, program.out_spec)

    def flat(self, given: Sequence[Any]) -> list[Any]:
        """The results of a call whose arguments are flat already."""
        import torch

        program = self.program
        outputs = self.executor.run({k: _wide(v, program.graph) for k, v in program.named(given).items()})
        tensors = {r.name: tensor_of(outputs[r.name], r.shape, r.dtype) for r in program.results if r.name}
        for number, name in program.written:
            with torch.no_grad():
                given[number].copy_(torch.from_numpy(np.ascontiguousarray(outputs[name])).reshape(given[number].shape))
        return [tensors[r.name] if r.name else r.constant_value for r in program.results]


def _wide(array: npt.NDArray[Any], graph: Graph) -> npt.NDArray[Any]:
    return array.reshape(-1) if array.ndim > 5 else array
