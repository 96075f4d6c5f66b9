"""Running plans: a store keeps what outlives them, an executor replays one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..backends.base import Array, Backend, BufferSpec, Device, Tensor, contiguous_strides
from ..graph.errors import PlanError
from ..graph.node import constant_array
from ..graph.spec import Spec
from .plan import Plan


class Store:
    """Weights and states of one device, shared by all plans that run over them; states begin as zeros.

    Raises `BackendError` when the device has no memory left.
    """

    def __init__(self, backend: Backend, device: Device) -> None:
        self.backend, self.device = backend, device
        self._buffers: dict[tuple[str, str], tuple[BufferSpec, Any]] = {}
        self._arena: tuple[int, Any] = (0, None)

    def bind(self, name: str, data: Array, spec: Spec) -> None:
        """Load a weight; `data` is as a file holds it: typed, or bytes ``[..., row bytes]`` if quantised."""
        stored = self.backend.stored(spec)
        buffer = self.backend.alloc(stored.nbytes, self.device)
        self.backend.load(data, spec, buffer)
        self._buffers["weight", name] = (BufferSpec("weight", name, stored.nbytes, spec, stored), buffer)

    def state(self, name: str) -> Any:
        """A state as an array in place (device memory for a GPU): assign to it to reset or restore."""
        try:
            spec, buffer = self._buffers["state", name]
        except KeyError:
            raise PlanError(f"there is no state %{name} yet; states appear with the first plan that has them") from None
        assert spec.stored is not None
        shape = spec.stored.shape
        return self.backend.view(buffer, Tensor(0, 0, shape, contiguous_strides(shape), spec.stored.dtype))

    @property
    def states(self) -> tuple[str, ...]:
        return tuple(name for kind, name in self._buffers if kind == "state")

    def nbytes(self) -> dict[str, int]:
        """Bytes held, by kind."""
        total = {"weight": 0, "state": 0, "arena": self._arena[0]}
        for (kind, _), (spec, _) in self._buffers.items():
            total[kind] += spec.nbytes
        return total

    def buffers(self, plan: Plan) -> list[Any]:
        """The buffers of a plan's program, made where they do not exist.  Raises `PlanError` on a clash or a weight
        that was never bound."""
        constants = {n.name: n for n in plan.graph.nodes if n.op == "constant"}
        found = []
        for spec in plan.program.buffers:
            if spec.kind == "arena":
                found.append(self._arena_of(spec.nbytes))
            elif spec.kind == "constant":
                assert spec.declared is not None
                buffer = self.backend.alloc(spec.nbytes, self.device)
                self.backend.load(constant_array(constants[spec.name]), spec.declared, buffer)
                found.append(buffer)
            else:
                found.append(self._persistent(spec))
        return found

    def _arena_of(self, nbytes: int) -> Any:
        """One arena serves all plans, since they run one at a time; it grows to the largest."""
        if nbytes > self._arena[0] or self._arena[1] is None:
            self._arena = (nbytes, self.backend.alloc(nbytes, self.device))
        return self._arena[1]

    def _persistent(self, spec: BufferSpec) -> Any:
        key = (spec.kind, spec.name)
        if key not in self._buffers:
            if spec.kind == "weight":
                raise PlanError(f"weight %{spec.name}: {spec.declared} is not bound; pass it when loading the plan")
            self._buffers[key] = (spec, self.backend.alloc(spec.nbytes, self.device))
        held, buffer = self._buffers[key]
        if held != spec:
            raise PlanError(f"{spec.kind} %{spec.name} is {held.declared} in the store but {spec.declared} in the plan")
        return buffer


class Executor:
    """One plan bound to its memory.  `run` copies inputs in, replays the program, copies outputs out."""

    def __init__(self, plan: Plan, store: Store) -> None:
        self.plan, self.store = plan, store
        buffers = store.buffers(plan)
        program = plan.program

        def views(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
            return {name: plan.backend.view(buffers[t.buffer], t) for name, t in tensors.items()}

        self._inputs, self._outputs = views(program.inputs), views(program.outputs)
        self._specs = {v.node.name: v.spec for v in plan.graph.inputs}
        self._replay = plan.backend.compile(program, buffers, plan.device)

    def run(self, inputs: Mapping[str, npt.ArrayLike]) -> dict[str, Array]:
        """Outputs by name, as host arrays of their own.  States advance.

        Raises `PlanError` for a missing, unknown or misshapen input.
        """
        for name in inputs.keys() - self._inputs.keys():
            raise PlanError(f"there is no input %{name}; inputs: {', '.join(self._inputs) or 'none'}")
        for name, view in self._inputs.items():
            self._bind(name, view, inputs)
        self._replay()
        return {name: np.array(view) for name, view in self._outputs.items()}

    def _bind(self, name: str, view: Any, inputs: Mapping[str, npt.ArrayLike]) -> None:
        spec = self._specs[name]
        if name not in inputs:
            raise PlanError(f"input %{name}: {spec} is missing")
        data = np.asarray(inputs[name])
        if data.shape != spec.shape:
            raise PlanError(f"input %{name}: got shape {list(data.shape)}, need {spec}")
        if spec.dtype.is_integer and data.dtype.kind not in "iu":
            raise PlanError(f"input %{name}: got {data.dtype}, need {spec}")
        view[...] = data


def load(plan: Plan, weights: Mapping[str, npt.ArrayLike]) -> Executor:
    """Bind `weights` (arrays by name, in the dtypes the graph declares) and make `plan` ready to run."""
    store = Store(plan.backend, plan.device)
    for value in plan.graph.weights:
        name, spec = value.node.name, value.spec
        if name in weights:
            data = np.asarray(weights[name])
            if not spec.dtype.is_quantised and data.shape != spec.shape:
                raise PlanError(f"weight %{name}: got shape {list(data.shape)}, need {spec}")
            store.bind(name, data if spec.dtype.is_quantised else data.astype(spec.dtype.storage), spec)
    return Executor(plan, store)
