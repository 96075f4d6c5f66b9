"""Bind the parameters and buffers of modules to captured graphs, in the memory where PyTorch has them.

Dynamo calls one graph with the parameters of any module of a class. The graph is planned once for all of them. Each
set of parameters has its own executor, which a call finds by the identities of the parameters:

1. A device that can read the memory of a parameter reads it there, so a change in place is visible at once.
2. A device of the host that cannot read it there, because of its strides, place or dtype, has a copy. The copy is
   refreshed at each call, because PyTorch does not count changes through ``parameter.data`` or NumPy.
3. A device with a memory of its own has a copy, which all graphs share. The copy is refreshed when the version of the
   parameter changes, or of a parameter that shares its memory.
4. Parameters are referenced weakly. Executors and copies are deleted with the first of their parameters.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdRef, WeakTensorKeyDictionary

from ...scheduler import Executor, Plan, Store
from ...scheduler.runtime.shared_buffers import WeightCopies
from ..tensors.tensor import limit_shape_to_max_rank
from .array_views import view_tensor_as_array
from .memory_sharers import MemorySharers
from .program import Program, Runner

_copies_by_parameter = WeakTensorKeyDictionary()
"""The `WeightCopies` of each live parameter, shared by all graphs that read the parameter."""
_sharers = MemorySharers()
"""The live parameters that have been bound, by the memory that they share."""
_binding_lock = threading.RLock()
"""Lock around the binding of parameters and the refresh of their copies."""


def is_module_tensor_bound_once(x: object) -> bool:
    """Whether an argument is bound once instead of copied at each call: a parameter, or another tensor of a module.

    Two kinds of tensors are copied instead: inference tensors, because PyTorch counts no changes of them, and bool
    tensors, because hocket stores booleans in another dtype.
    """
    if not isinstance(x, torch.nn.Parameter) and getattr(x, "_dynamo_static_input_type", None) is None:
        return False
    return isinstance(x, torch.Tensor) and x.dtype is not torch.bool and not x.is_inference()


class _ParameterVersions:
    """PyTorch's counts of changes of some parameters, and of other live parameters that share their memory."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.update_counts_and_sharers(parameters)

    def update_counts_and_sharers(self, parameters: Sequence[torch.Tensor]) -> None:
        """Record the present change counts of parameters, and find anew which other parameters share their memory."""
        self._sharing_count = _sharers.change_count
        others = {id(other): other for p in parameters for other in _sharers.find_sharers(p)}
        self._others = [WeakIdRef(other) for other in others.values()]
        self._counts = self._read_counts(parameters)

    def are_unchanged_since_update(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Return whether no parameter has changed since the last update.

        The result is false, too, if further tensors began to share memory with parameters since then: a change through
        one of them would stay unseen.
        """
        return self._sharing_count == _sharers.change_count and self._counts == self._read_counts(parameters)

    def _read_counts(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        counts = [p._version for p in parameters]
        if self._others:
            counts += [other._version for other in (known() for known in self._others) if other is not None]
        return counts


@dataclass(frozen=True, eq=False, slots=True)
class _ExecutorOfParameters:
    """An executor that reads one set of parameters, with their places and versions at the time of binding.

    `storages` keeps the memory of the parameters alive. So no other tensor can get the same address before the next
    comparison. `host_copied` has the numbers of parameters that a device of the host reads from a copy.
    """

    parameters: tuple[WeakIdRef, ...]
    storages: list[torch.UntypedStorage]
    places: list[tuple[int, tuple[int, ...]]]
    host_copied: list[int]
    versions: _ParameterVersions
    runner: Runner

    def is_bound_to_memory_of(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether the executor reads exactly the memory of these parameters."""
        return self.places == list(map(_get_address_and_strides, parameters)) and all(
            known() is p for known, p in zip(self.parameters, parameters, strict=True)
        )


def _get_address_and_strides(parameter: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    """Return the address and the strides of a parameter; a change of ``parameter.data`` may change either of them."""
    return parameter.data_ptr(), parameter.stride()


class ExecutorsByParameters:
    """The executors of one planned program: one for each set of parameters with which the program is called.

    All executors share the memory of intermediate values.
    """

    def __init__(self, program: Program, plan: Plan, module: torch.nn.Module) -> None:
        self.program, self.plan, self.module = program, plan, module
        self.own_parameter_names = [name for name, _ in module.named_parameters() if name in program.weights]
        """Names of parameters that are no arguments, which occur in a graph that Dynamo did not capture."""
        self.parameter_names = [name for _, name in program.bound_arguments] + self.own_parameter_names
        self.weight_specs = {value.node.name: value.spec for value in plan.graph.weights}
        self.store = Store(plan.group)
        for name in self.weight_specs.keys() & program.weights.keys() - set(self.own_parameter_names):
            self.store.bind(name, program.weights[name], self.weight_specs[name], plan.leaves[name])
        self.binding_by_ids: dict[tuple[int, ...], _ExecutorOfParameters] = {}

    def bind_runner_and_refresh_copies(self, args: Sequence[Any]) -> Runner:
        """Return a runner that reads the parameters of a call; copies of parameters that have changed are refreshed."""
        parameters = [args[number] for number, _ in self.program.bound_arguments]
        parameters += [self.module.get_parameter(name) for name in self.own_parameter_names]
        key = tuple(map(id, parameters))
        binding = self.binding_by_ids.get(key)
        if binding is None or not binding.is_bound_to_memory_of(parameters):
            with _binding_lock:
                binding = self.binding_by_ids[key] = self._build_executor_for_parameters(key, parameters)
        elif not binding.versions.are_unchanged_since_update(parameters):
            with _binding_lock:
                binding.versions.update_counts_and_sharers(parameters)
                self._bind_or_refresh_parameters(binding.runner.executor.store, range(len(parameters)), parameters)
        elif binding.host_copied:
            with _binding_lock:
                self._bind_or_refresh_parameters(binding.runner.executor.store, binding.host_copied, parameters)
        return binding.runner

    def _build_executor_for_parameters(
        self, key: tuple[int, ...], parameters: Sequence[torch.Tensor]
    ) -> _ExecutorOfParameters:
        """Build an executor that reads a set of parameters. It is deleted when one of them is deleted."""
        mine, store = weakref.ref(self), self.store.share_weights_and_arena()

        def forget(_: object) -> None:
            if (bindings := mine()) is not None:
                bindings.binding_by_ids.pop(key, None)

        known, places = tuple(WeakIdRef(p, forget) for p in parameters), list(map(_get_address_and_strides, parameters))
        storages = [p.untyped_storage() for p in parameters]
        for parameter in parameters:
            _sharers.add_or_update_parameter_storage(parameter)
        versions = _ParameterVersions(parameters)
        self._bind_or_refresh_parameters(store, range(len(parameters)), parameters)
        host_copied = [n for n, p in enumerate(parameters) if _copies_by_parameter[p].has_host_copies]
        runner = Runner(self.program, self.plan, Executor(self.plan, store))
        return _ExecutorOfParameters(known, storages, places, host_copied, versions, runner)

    def _bind_or_refresh_parameters(
        self, store: Store, numbers: Sequence[int], parameters: Sequence[torch.Tensor]
    ) -> None:
        """Bind the parameters of these numbers to the weights of a store; copies that may be outdated are refreshed."""
        for number in numbers:
            name, parameter = self.parameter_names[number], parameters[number]
            copies = _copies_by_parameter.get(parameter)
            if copies is None:
                copies = _copies_by_parameter[parameter] = WeightCopies(is_source_lasting=False)
            # An array of a parameter that is not contiguous may be a copy, which would not see changes
            copies.is_source_lasting = parameter.device.type == "cpu" and parameter.is_contiguous()
            copies.source = parameter.untyped_storage()
            others = [other._version for other in _sharers.find_sharers(parameter)]
            uncounted = object() if copies.has_host_copies else None
            copies.version = (_get_address_and_strides(parameter), parameter._version, uncounted, *others)
            array = view_tensor_as_array(parameter, name).reshape(limit_shape_to_max_rank(parameter.shape))
            store.bind(name, array, self.weight_specs[name], self.plan.leaves[name], copies=copies)
