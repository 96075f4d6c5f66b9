"""The model layout: the distribution of weights and states over devices, which all plans of a session keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from ...distributed import SINGLE_PROCESS, World
from ...graph.graph import Graph
from ...graph.lazy_dataclass import dataclass
from ...graph.spec import Spec
from ...scheduler import HostOffload, Plan, Store, plan_with_cache
from ...scheduler.costs.rank_speeds import agree_on_slowest_rank_speeds
from ..models import Model, Step
from .device_group import DeviceGroup, resolve_devices
from .model_digest import make_shared_mapping_key
from .prefill_chunks import list_allowed_chunk_sizes

if TYPE_CHECKING:
    from ...scheduler import Workload
    from ...scheduler.costs.hardware import Hardware
    from ...scheduler.lowering.device_plan import Devices

OFFLOAD_DEVICE = "cpu:0"
"""Device that stores the weights and states that do not fit on the other devices."""
BALANCED_PROMPT_TOKENS = 128
"""Prompt tokens for which the mode ``layer`` balances the time of the devices."""
ASSUMED_PROMPT_TOKENS, ASSUMED_NEW_TOKENS = 512, 128
"""Prompt tokens, and decoded tokens after them, for which the mode ``auto`` compares layouts on several devices."""


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Progress of weight loading: the loaded bytes of the model file, and all its bytes."""

    loaded_bytes: int
    total_bytes: int


def plan_model_layout(
    on: DeviceGroup,
    world: World,
    place: tuple[tuple[str, str], ...],
    graph_of: Callable[[Step], Graph],
    first_step: Step,
    largest_step: Step,
    *,
    can_pipeline: bool,
) -> Plan:
    """Choose on which device each weight lies, and return this layout as the plan of `first_step`.

    All other plans of the session keep the layout. If memory is too short for `largest_step`, the layout comes from a
    plan of `largest_step` with host offload. In the mode ``layer``, each device gets layers for an equal time of a
    prompt. Given shares or different memory sizes decide instead.

    Args:
        on: The devices.
        world: The ranks.
        place: Placement rules, as pairs of a pattern and a device.
        graph_of: Builds the graph of a step.
        first_step: The step that reads all weights.
        largest_step: The step that needs the most memory.
        can_pipeline: Whether runs may be pipelined; then the mode ``auto`` compares layouts for a prompt and decoding.
    """
    asked, one = resolve_devices(on, world), graph_of(first_step)
    cells = max(first_step.cells, min(ASSUMED_PROMPT_TOKENS, first_step.context))

    def graph_with(sequences: int, tokens: int) -> Graph:
        return graph_of(replace(first_step, sequences=sequences, tokens=tokens, outputs=sequences, cells=cells))

    use = (
        replace(
            create_layout_workload(graph_with, first_step.sequences, first_step.context),
            lone_hardware=find_speeds_of_first_device_alone(on, asked, one, world),
        )
        if can_pipeline and on.split_mode == "auto" and len(asked) > 1
        else None
    )

    def plan_graph(graph: Graph, group: Devices, **how: Any) -> Plan:
        return plan_with_cache(
            graph,
            group,
            place=place,
            hardware=agree_on_slowest_rank_speeds(group, world).hardware_for_graph(graph),
            **how,
        )

    options = partial(plan_graph, split_mode=on.split_mode, use=use)
    shares = on.tensor_split
    if on.split_mode == "layer" and not shares and len({device.memory for _, device in asked}) == 1 < len(asked):
        from ...scheduler import compute_balanced_proportions

        shares = compute_balanced_proportions(graph_of(replace(first_step, tokens=BALANCED_PROMPT_TOKENS)), len(asked))
    first = options(one, asked, tensor_split=shares)
    if first.unused_devices and on.threads is None:  # used devices share the processors of unused ones
        group = resolve_devices(replace(on, devices=tuple(str(device) for _, device in first.group)), world)
        first = plan_graph(one, group, like=first)
    host = HostOffload(
        *resolve_devices(replace(on, devices=(f"{OFFLOAD_DEVICE}@0" if world.size > 1 else OFFLOAD_DEVICE,)), world)[0]
    )
    if host.device in (device for _, device in asked) or all(device.memory is None for _, device in asked):
        return first
    from ...scheduler import compute_missing_bytes

    largest = graph_of(largest_step)
    if not compute_missing_bytes(plan_graph(largest, first.group, like=first)):
        return first
    offload_plan = options(largest, asked, tensor_split=on.tensor_split, host=host)
    return plan_graph(one, offload_plan.group, like=offload_plan)


def create_layout_workload(graph_of: Callable[[int, int], Graph], sequences: int, context: int) -> Workload:
    """Make the workload for which a model layout is chosen: each sequence reads a prompt and then decodes tokens.

    Args:
        graph_of: Builds the graph of a step from the numbers of sequences and of tokens.
        sequences: Number of sequences.
        context: Context of a sequence in tokens.
    """
    from ...scheduler import Workload

    prompt = min(ASSUMED_PROMPT_TOKENS, context)
    return Workload(cache(graph_of), list_allowed_chunk_sizes(prompt), sequences, prompt, ASSUMED_NEW_TOKENS)


def find_speeds_of_first_device_alone(
    on: DeviceGroup, group: Devices, graph: Graph, world: World = SINGLE_PROCESS
) -> Hardware | None:
    """Find the speeds of the first device of a group when a session uses no other device.

    A device alone is faster if no thread count is given: it gets all processors that the devices would share.

    Returns:
        The speeds. The result is None for one device or with a thread count, because the speeds of the group hold then.
        It is also None for several processes, and if the speeds of device and group have different sources.
    """
    if on.threads is not None or len(group) == 1 or world.size > 1:
        return None
    lone = resolve_devices(replace(on, devices=(str(group[0][1]),)), world)
    alone, together = (
        agree_on_slowest_rank_speeds(devices, world).hardware_for_graph(graph) for devices in (lone, group)
    )
    return alone if alone.source == together.source else None


def load_weights_largest_first(
    store: Store, model: Model, plan: Plan, on_progress: Callable[[LoadProgress], None] | None
) -> None:
    """Load every weight of a plan from the model into a store.

    Large weights come first, while little else is in memory. The others follow in the order of the graph. `on_progress`
    is called after each weight.
    """
    stored = model.tensors
    weights = {w.node.name: stored[w.node.name] for w in plan.graph.weights}
    total = sum(t.nbytes for t in weights.values())
    tensors = dict(sorted(weights.items(), key=lambda item: -max(item[1].nbytes, total // 16)))
    done = 0
    store.loaded_bytes.skip_ranks_with_shared_files(make_shared_mapping_key([t.file for t in tensors.values()]))
    for name, tensor in tensors.items():
        spec = Spec(tensor.shape, tensor.dtype)
        store.bind(name, tensor.stored_elements, spec, plan.leaves[name], tensor.cache_identity, tensor.release_memory)
        done += tensor.nbytes
        if on_progress:
            on_progress(LoadProgress(done, total))
    for file in {tensor.file for tensor in tensors.values()}:  # pages of the header and of read-ahead
        file.release_memory(0, file.size)
