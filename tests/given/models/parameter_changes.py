"""Changes of the parameters of two PyTorch models of one class between calls, and graph breaks in their layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch


def list_repeated_parts(model: torch.nn.Module, package: str) -> list[torch.nn.Module]:
    """Return the layers of a model and the parts of the layers, as far as `package` defines their classes."""
    lists = (torch.nn.ModuleList, torch.nn.Sequential)
    layers = [layer for part in model.modules() if isinstance(part, lists) for layer in part]
    layers = layers or list(model.children())
    parts = [part for layer in layers for part in (layer, *layer.children())]
    return [part for part in parts if type(part).__module__.partition(".")[0] == package]


class Stage(torch.nn.Module):
    """A module of PyTorch as a part of a model."""

    def __init__(self, part: torch.nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *args: Any) -> Any:
        return self.part(*args)


def wrap_stages(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Replace the modules in each `torch.nn.Sequential` of a model by stages, and return the stages."""
    sequences = [part for part in model.modules() if type(part) is torch.nn.Sequential]
    for sequence in sequences:
        for i, part in enumerate(sequence):
            sequence[i] = Stage(part)
    return [stage for sequence in sequences for stage in sequence]


def break_in_parts(parts: list[torch.nn.Module], set_attribute: Callable[[Any, str, Any], None]) -> None:
    """Make Dynamo break its graph at the start of ``forward`` of each class of `parts`, with `set_attribute`."""
    for cls in {type(part) for part in parts}:

        def forward_after_break(self: Any, *args: Any, forward: Any = cls.forward, **kwargs: Any) -> Any:
            torch._dynamo.graph_break()
            return forward(self, *args, **kwargs)

        set_attribute(cls, "forward", forward_after_break)


def _list_parameters(*models: torch.nn.Module) -> Iterator[tuple[tuple[torch.nn.Module, ...], str]]:
    """List the parameters of models of one class: the modules that own a parameter, one a model, and its name.

    A parameter that is tied within a model is listed once for each of its owners.
    """
    for owners in zip(*(model.modules() for model in models), strict=True):
        for name, parameter in owners[0]._parameters.items():
            if parameter is not None:
                yield owners, name


def update_in_place(first: torch.nn.Module, second: torch.nn.Module) -> None:
    """Change each parameter and each float buffer in its memory."""
    for model in (first, second):
        for parameter in model.parameters():
            parameter.mul_(1.25)
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.mul_(1.125)


def exchange_state(first: torch.nn.Module, second: torch.nn.Module) -> None:
    """Load the numbers of each model into the memory of the other one."""
    state = copy.deepcopy(first.state_dict())  # with the versions of modules, which a plain dict loses
    first.load_state_dict(second.state_dict())
    second.load_state_dict(state)


def move_memory(first: torch.nn.Module, second: torch.nn.Module) -> None:
    """Give each parameter another memory with other numbers."""
    for model in (first, second):
        for parameter in model.parameters():
            parameter.data = 0.75 * parameter.data


def replace_parameters(first: torch.nn.Module, second: torch.nn.Module) -> None:
    """Replace each parameter of the first model by a new one, between the parameters of both models."""
    for (mine, theirs), name in list(_list_parameters(first, second)):
        mean = 0.5 * getattr(mine, name) + 0.5 * getattr(theirs, name)
        setattr(mine, name, torch.nn.Parameter(mean))


def swap_parameters(first: torch.nn.Module, second: torch.nn.Module) -> None:
    """Exchange the parameter objects of two models."""
    for (mine, theirs), name in list(_list_parameters(first, second)):
        a, b = getattr(mine, name), getattr(theirs, name)
        setattr(mine, name, b)
        setattr(theirs, name, a)


def tie_layers(first: torch.nn.Module, second: torch.nn.Module) -> None:
    """Tie the layers of the first model to each other, and every other parameter of the second model to the first."""
    for part in list(first.modules()):
        if isinstance(part, torch.nn.ModuleList) and len({type(layer) for layer in part}) == 1:
            for layer in list(part)[1:]:
                _tie_equal_parameters(layer, part[0])
    for i, ((mine, theirs), name) in enumerate(list(_list_parameters(second, first))):
        if i % 2:
            setattr(mine, name, getattr(theirs, name))


def _tie_equal_parameters(layer: torch.nn.Module, source: torch.nn.Module) -> None:
    """Give a layer each parameter of another layer that has the same name and the same shape."""
    shared = dict(source.named_parameters())
    for name, parameter in list(layer.named_parameters()):
        if name in shared and shared[name].shape == parameter.shape:
            owner, _, last = name.rpartition(".")
            setattr(layer.get_submodule(owner), last, shared[name])


def untie_parameters(first: torch.nn.Module, second: torch.nn.Module) -> None:
    """Replace each parameter by one of its own, so that no parameter is tied any more."""
    for i, model in enumerate((first, second)):
        for (owner,), name in list(_list_parameters(model)):
            setattr(owner, name, torch.nn.Parameter((0.75 + 0.5 * i) * getattr(owner, name)))


def tie_memory(first: torch.nn.Module, second: torch.nn.Module) -> None:
    """Let each parameter of the second model be another object over the memory of the first, then change the first."""
    for (mine, theirs), name in list(_list_parameters(first, second)):
        getattr(theirs, name).data = getattr(mine, name).data
    for parameter in first.parameters():
        parameter.mul_(1.25)


CHANGES: Mapping[str, Callable[[torch.nn.Module, torch.nn.Module], None]] = MappingProxyType(
    {
        "update in place": update_in_place,
        "exchange the state": exchange_state,
        "move the memory": move_memory,
        "replace parameters": replace_parameters,
        "swap parameters": swap_parameters,
        "tie layers": tie_layers,
        "untie parameters": untie_parameters,
        "tie memory": tie_memory,
    }
)
"""By title, in this order; the two models remain different until the last change."""
