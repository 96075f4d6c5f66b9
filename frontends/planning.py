"""What `hocket plan` plans: the graph of one step of a model, or one in a file, without loading a weight."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from ..backends.base import find
from ..graph import Graph, PlanError
from ..scheduler import CPU, Host, Plan, plan_for, plan_from_json, shortage, simulate
from .errors import ModelError
from .gguf.reader import MAGIC
from .graph_file import LARGEST, read_graph
from .models import Step
from .open import context_for, open_model
from .session import HOST, Group


def step_graph(path: str, *, context: int | None, tokens: int) -> tuple[Graph, int | None]:
    """The graph in a file, and its context if it is of a model: then with all of it in use, and one row of logits.

    That is the largest graph that a session of this context runs with so many tokens, so what fits fits.  Raises
    `ModelError` or `GraphError`.
    """
    with open(path, "rb") as file:
        is_model = file.read(len(MAGIC)) == MAGIC
    if not is_model:
        return read_graph(path), None
    model = open_model(path, header_only=True)
    context = context_for(model, 0, context)
    return model.graph(Step(1, min(tokens, context), context, context, 1)), context


def plan_group(graph: Graph, on: Group, simulated: str | None = None) -> tuple[Plan, Plan]:
    """The plan of `graph` for devices, or for simulated ones, and what a session would do: the same if that fits (or
    nothing does), else one in which the host takes the rest."""
    if simulated is None:
        group, hardware, host = [find(name) for name in on.devices], CPU, Host(*find(HOST))
    else:
        simulation = simulate(simulated)
        group, hardware = list(simulation.group), simulation.hardware
        host = Host(*simulation.host, simulation.host_hardware)
    options = partial(plan_for, split_mode=on.split_mode, tensor_split=on.tensor_split, place=on.place)
    made = options(graph, group, hardware=hardware)
    return made, options(graph, group, hardware=hardware, host=host) if shortage(made) else made


def read_plan(path: str) -> Plan:
    """A plan that was written as JSON.  Raises `ModelError` if it is none."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise PlanError(f"has more than {LARGEST} bytes")
        return plan_from_json(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise ModelError(f"{path}: is no plan (not UTF-8); write one with `hocket plan --json`") from None
    except PlanError as why:
        raise ModelError(f"{path}: {why}") from None
