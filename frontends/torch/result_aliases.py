"""Results of a captured graph that share memory with an argument or with another result.

A graph of hocket writes each result to memory of its own. Code after a graph break may change a result in place and
read the change through another tensor. So the results get the memory that they have in eager PyTorch:

1. PyTorch runs the graph on fake tensors, which have storages and strides, but no numbers.
2. A result in the storage of an argument becomes a view of the argument.
3. Results that share another storage become views of one new tensor.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..errors import ModelError


@dataclass(frozen=True, slots=True)
class _ResultView:
    """A result as a view of a tensor: its sizes, its strides, and the distance of its first entry, in entries."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def build_view_of_tensor(self, source: torch.Tensor) -> torch.Tensor:
        """Build a view of `source` with the recorded shape, strides and offset from the first entry of `source`."""
        return torch.as_strided(source, self.sizes, self.strides, source.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class ResultAliases:
    """The results of a graph that share memory.

    `argument_by_result` has the results that are arguments, `argument_views` the results that are views of arguments,
    and `groups` the other results that share memory with each other. Results and arguments are given by index.
    """

    argument_by_result: dict[int, int]
    argument_views: dict[int, tuple[int, _ResultView]]
    groups: tuple[dict[int, _ResultView], ...]

    def __bool__(self) -> bool:
        return bool(self.argument_by_result or self.argument_views or self.groups)

    def share_memory(self, args: Sequence[Any], result: Any) -> Any:
        """Return the results of a call with the memory that they share in eager PyTorch."""
        results, spec = tree_flatten(result)
        with torch.no_grad():
            for i, number in self.argument_by_result.items():
                results[i] = args[number]
            for i, (number, view) in self.argument_views.items():
                results[i] = view.build_view_of_tensor(args[number])
            for views in self.groups:
                entries = max(view.offset + _count_spanned_entries(view) for view in views.values())
                source = results[next(iter(views))].new_empty(entries)
                for i, view in views.items():
                    results[i] = _write_entries_to_view(view.build_view_of_tensor(source), results[i])
        return tree_unflatten(results, spec)


def _write_entries_to_view(view: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """Write the entries of a tensor to a view of the same shape, and return the view.

    PyTorch refuses to write to a view that repeats an entry along an axis, so the entry is written once.
    """
    target = view
    for axis, stride in enumerate(view.stride()):
        if stride == 0:
            target, entries = target.narrow(axis, 0, 1), entries.narrow(axis, 0, 1)
    target.copy_(entries)
    return view


def _count_spanned_entries(view: _ResultView) -> int:
    """Count the entries from the first one of a view to its last one."""
    return 1 + sum((size - 1) * stride for size, stride in zip(view.sizes, view.strides, strict=True))


def may_share_memory(module: torch.fx.GraphModule) -> bool:
    """Whether a result of a captured graph may share memory, by the fake values that Dynamo keeps for its nodes."""
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    results = [node for node in tree_leaves(output.args[0]) if isinstance(node, torch.fx.Node)]
    if any("example_value" not in node.meta for node in (*nodes, *results)):
        return True
    arguments, values = ([node.meta["example_value"] for node in group] for group in (nodes, results))
    storages = [_get_storage_identity(value) for value in values if isinstance(value, torch.Tensor)]
    taken = {_get_storage_identity(value) for value in arguments if isinstance(value, torch.Tensor)}
    return len(set(storages)) < len(storages) or not taken.isdisjoint(storages)


def find_result_aliases(module: Callable[..., Any], args: Sequence[Any]) -> ResultAliases:
    """Find the results of a call that share memory in eager PyTorch.

    Raises:
        ModelError: PyTorch cannot run the graph on fake tensors, or a result has the memory of another dtype.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with warnings.catch_warnings(), torch.no_grad(), mode:
            warnings.simplefilter("ignore")
            fakes = [mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
            results = tree_leaves(module(*fakes))
    except Exception as why:  # this runs the user's model, which may raise anything
        first = str(why).strip().partition("\n")[0]
        raise ModelError(f"it cannot run on fake tensors: {first}") from None
    number_by_id = {id(fake): number for number, fake in enumerate(fakes) if isinstance(fake, torch.Tensor)}
    number_by_storage = {
        _get_storage_identity(fake): number
        for number, fake in enumerate(fakes)
        if isinstance(fake, torch.Tensor) and fake.numel()
    }
    equal: dict[int, int] = {}
    views: dict[int, tuple[int, _ResultView]] = {}
    shared: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)
    for i, result in enumerate(results):
        if not isinstance(result, torch.Tensor) or not result.numel():
            continue
        if (number := number_by_id.get(id(result))) is not None:
            equal[i] = number
        elif (number := number_by_storage.get(_get_storage_identity(result))) is not None:
            _require_equal_dtypes(result, fakes[number])
            offset = int(result.storage_offset()) - int(fakes[number].storage_offset())
            views[i] = number, _ResultView(tuple(result.shape), result.stride(), offset)
        else:
            shared[_get_storage_identity(result)][i] = result
    groups = [_describe_results_as_views(group) for group in shared.values() if len(group) > 1]
    return ResultAliases(equal, views, tuple(groups))


def _get_storage_identity(tensor: torch.Tensor) -> int:
    """Return the identity of the storage of a tensor: a number that is equal for tensors with the same storage."""
    return int(tensor.untyped_storage()._cdata)


def _describe_results_as_views(results: dict[int, torch.Tensor]) -> dict[int, _ResultView]:
    """Describe results that share one storage as views of it, by index of the result.

    Offsets count from the first entry of the storage that any of the results has.
    """
    first = next(iter(results.values()))
    for result in results.values():
        _require_equal_dtypes(result, first)
    start = min(int(result.storage_offset()) for result in results.values())
    return {
        i: _ResultView(tuple(result.shape), result.stride(), int(result.storage_offset()) - start)
        for i, result in results.items()
    }


def _require_equal_dtypes(result: torch.Tensor, source: torch.Tensor) -> None:
    if result.dtype != source.dtype:
        raise ModelError(f"a result of {result.dtype} has the memory of {source.dtype}")
