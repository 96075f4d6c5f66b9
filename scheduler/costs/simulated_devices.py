"""Simulated devices: known hardware by name, for plans and predicted times of hardware that is not present.

Plans for simulated GPUs follow the rules of the real backend: stored dtypes, scratch bytes and fused instructions.

The peak speeds are in `device_catalogue`. For GPUs, the backend has the shares of the peak that families of kernels
reach: matrix products by the dtype of the weights, other ops by op. The shares were measured on some kinds of devices.
For the other kinds they are an estimate, with the same shares of their own data sheets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ...backends.base import Array, Comm, Device, Program, Support, Tensor, load_backend
from ...backends.capabilities import (
    OTHER_OPS,
    KernelCall,
    KernelEfficiencies,
    ListsKernels,
    ReportsFusion,
    SupportsOverlap,
    SupportsSimulation,
)
from ...graph import Graph
from ...graph.errors import BackendError, PlanError
from ...graph.node import Node
from ...graph.old_names import make_module_getattr
from ...graph.spec import Spec
from ...graph.validation import TEXT, validate_arguments
from .device_catalogue import CATALOGUE, DATA_SHEETS, DataSheet, DeviceAndLinkCatalogue
from .hardware import BUILT_IN_SOURCE, PRODUCTS, Hardware
from .machine_file import read_simulated_machine_file
from .speeds import Speeds

TERA = 1e12
SIMULATED_BACKEND_NAME = "simulated"
"""The name of the backends of simulated devices, as in plans in JSON."""
DATA_SHEET_SOURCE = "data sheet"
"""The `Hardware.source` of speeds from the data sheets of the makers."""
MAX_SIMULATED_DEVICES = 1024
"""The largest number of devices of a simulated group."""
HOST_LINK = ("pcie4",)
"""The link between simulated devices and their host."""


class SimulatedBackend:
    """A backend for planning without devices: it answers the planner's questions, but cannot run programs.

    Values keep their dtypes, kernels need no scratch memory, and each instruction is one launch.

    Attributes:
        kind: The device kind, such as ``h200``.
        data_sheet: The speeds and the memory of this kind.
    """

    name = SIMULATED_BACKEND_NAME

    def __init__(self, kind: str, data_sheet: DataSheet) -> None:
        self.kind, self.data_sheet = kind, data_sheet

    def with_threads(self, threads: int) -> SimulatedBackend:
        return self

    @property
    def efficiencies(self) -> KernelEfficiencies | None:
        """The shares of the data sheet that kernels reach; None if only the data sheet is known."""
        return None

    @cached_property
    def measured_hardware(self) -> Hardware:
        """The speeds of one device: its data sheet, and the speed that kernels reach in each cost class."""
        sheet, shares = self.data_sheet, self.efficiencies
        if shares is None:
            return Hardware(sheet.flops, sheet.bandwidth, sheet.launch)
        return apply_efficiencies(sheet, shares)

    @property
    def speed_source(self) -> str:
        """The origin of the speeds of this kind, such as ``measured on h100 and h200``."""
        if self.efficiencies is None:
            return BUILT_IN_SOURCE if self.data_sheet == DATA_SHEETS["cpu"] else DATA_SHEET_SOURCE
        kinds = " and ".join(self.efficiencies.measured_on)
        if self.kind in self.efficiencies.measured_on:
            return f"kernels measured on {kinds}"
        return f"estimate for {self.kind}, data sheet with the kernels of {kinds}"

    def devices(self) -> Sequence[Device]:
        return tuple(map(self.device, range(MAX_SIMULATED_DEVICES)))

    def device(self, index: int) -> Device:
        if index >= MAX_SIMULATED_DEVICES:
            raise BackendError(
                f"{self.kind}:{index} is one too many to simulate; at most {MAX_SIMULATED_DEVICES} devices"
            )
        return Device(self.kind, index, self.data_sheet.memory, "simulated")

    def supports(self, node: Node, on: Device) -> Support:
        return Support(True)

    def classify_device(self, on: Device) -> str:
        return self.kind

    def storage_spec(self, spec: Spec, kind: str = "value") -> Spec:
        return spec

    def scratch(self, node: Node) -> int:
        return 0

    def reads_strided(self, node: Node, operand: int) -> bool:
        return True

    def alloc(self, nbytes: int, on: Device, lasting: bool = False) -> Any:
        self._raise_needs_real_device(f"allocate {nbytes} bytes on {on}")

    def view(self, buffer: Any, tensor: Tensor) -> Any:
        self._raise_needs_real_device("show an array")

    def load(self, data: Array, declared: Spec, buffer: Any) -> None:
        self._raise_needs_real_device("load a weight")

    def compile(self, program: Program, buffers: Sequence[Any], on: Device, comm: Comm) -> Callable[[], None]:
        self._raise_needs_real_device(f"run a program on {on}")

    def _raise_needs_real_device(self, what: str) -> NoReturn:
        """Raise `BackendError`, because a simulated device cannot do an action such as "load a weight"."""
        raise BackendError(f"{self.kind} is simulated and cannot {what}; plan for devices that are there to run")


class SimulatedGpu(SimulatedBackend):
    """A simulated GPU backend: it answers the planner's questions as the backend of a real GPU would."""

    def __init__(self, kind: str, data_sheet: DataSheet) -> None:
        super().__init__(kind, data_sheet)
        backend = load_backend(data_sheet.backend)
        assert isinstance(backend, SupportsSimulation)
        self.planning_backend = backend.make_simulated_backend(data_sheet.capability)
        self._efficiencies = backend.read_kernel_efficiencies()

    @property
    def efficiencies(self) -> KernelEfficiencies:
        return self._efficiencies

    def supports(self, node: Node, on: Device) -> Support:
        return self.planning_backend.supports(node, on)

    def storage_spec(self, spec: Spec, kind: str = "value") -> Spec:
        return self.planning_backend.storage_spec(spec, kind)

    def scratch(self, node: Node) -> int:
        return self.planning_backend.scratch(node)

    def reads_strided(self, node: Node, operand: int) -> bool:
        return self.planning_backend.reads_strided(node, operand)

    def list_kernels(self, program: Program, on: Device) -> Sequence[KernelCall]:
        """List the kernel calls with which a real GPU would run the program, in order."""
        return (
            self.planning_backend.list_kernels(program, on) if isinstance(self.planning_backend, ListsKernels) else ()
        )

    def can_overlap_collectives(self, devices: Sequence[Device]) -> bool:
        return isinstance(self.planning_backend, SupportsOverlap) and self.planning_backend.can_overlap_collectives(
            devices
        )

    def list_fused_groups(self, program: Program, on: Device) -> Sequence[Sequence[int]]:
        assert isinstance(self.planning_backend, ReportsFusion)
        return self.planning_backend.list_fused_groups(program, on)


def build_simulated_backend(kind: str, data_sheet: DataSheet | None = None) -> SimulatedBackend:
    """Build the backend that simulates devices of one kind.

    Args:
        kind: The name of the kind.
        data_sheet: Its data sheet; None for a built-in kind.

    Raises:
        PlanError: The kind is unknown; the message lists the known kinds.
    """
    if data_sheet is None and kind not in DATA_SHEETS:
        raise PlanError(f"there is no hardware {kind!r} to simulate; known: {', '.join(DATA_SHEETS)}")
    data_sheet = data_sheet or DATA_SHEETS[kind]
    return SimulatedGpu(kind, data_sheet) if data_sheet.capability else SimulatedBackend(kind, data_sheet)


def apply_efficiencies(sheet: DataSheet, shares: KernelEfficiencies) -> Hardware:
    """Return the speeds that kernels reach on a device: the figures of the data sheet times measured shares below 1."""
    bandwidth = {name: share * sheet.bandwidth for name, share in shares.memory.items()}
    launch = {name: times * sheet.launch for name, times in shares.launch.items()}
    return Hardware(
        flops=sheet.flops,
        bandwidth=sheet.bandwidth,
        launch=launch[OTHER_OPS],
        value_bandwidth=bandwidth[OTHER_OPS],
        op_flops={name: share * sheet.flops for name, share in shares.arithmetic.items()},
        op_bandwidth=bandwidth,
        op_launch=launch,
    )


@dataclass(frozen=True, slots=True)
class SimulatedGroup:
    """Simulated devices to plan for, with their speeds, and the host that can take weights that do not fit.

    Attributes:
        group: The backend and the device of each simulated device.
        hardware: The lowest speeds of the devices, from the data sheets.
        host: The backend and the device of the host.
        host_hardware: The speeds of the host.
    """

    group: tuple[tuple[SimulatedBackend, Device], ...]
    hardware: Hardware
    host: tuple[SimulatedBackend, Device]
    host_hardware: Hardware

    def hardware_for(self, graph: Graph) -> Hardware:
        """Return the predicted speeds of the slowest device for a graph.

        All seconds are predicted from the speeds by cost class. `Hardware.flops` and `Hardware.bandwidth` are the mean
        speeds of products with the weights of the graph.
        """
        each = [backend.measured_hardware for backend in self.backends_by_kind.values()]
        flops = _choose_slowest([(one.op_flops, one.flops) for one in each], min)
        bandwidth = _choose_slowest([(one.op_bandwidth, one.bandwidth) for one in each], min)
        launch = max(one.launch for one in each)
        if not bandwidth:
            return self.hardware
        dtypes = {str(v.dtype) for v in graph.weights} or {PRODUCTS}
        products = Speeds(
            {dtype: bandwidth.get(dtype, bandwidth[PRODUCTS]) for dtype in dtypes},
            {dtype: flops.get(dtype, flops[PRODUCTS]) for dtype in dtypes},
            launch,
        ).hardware_for(graph)
        return replace(
            self.hardware,
            flops=products.flops,
            bandwidth=products.bandwidth,
            launch=launch,
            value_bandwidth=min(one.value_bandwidth for one in each),
            op_flops=flops,
            op_bandwidth=bandwidth,
            op_launch=_choose_slowest([(one.op_launch, one.launch) for one in each], max),
            source=", ".join(dict.fromkeys(backend.speed_source for backend in self.backends_by_kind.values())),
        )

    @property
    def backends_by_kind(self) -> Mapping[str, SimulatedBackend]:
        """The simulated backend of each kind of device."""
        return {backend.kind: backend for backend, _ in self.group}

    def describe_speeds(self, graph: Graph) -> Iterator[str]:
        """Yield lines of text that describe the speeds of a plan for `graph`.

        The first line has the source of the speeds, and the speeds of matrix products. One line follows for each dtype
        of weights, and for each op with a known speed: the speed, and its share of the data sheet.
        """
        used = self.hardware_for(graph)
        read, multiplied = used.bandwidth / TERA, used.flops / TERA
        rates = f"weights read at {read:.3g} TB/s and multiplied at {multiplied:.3g} TFLOP/s"
        yield f"speeds: {used.source}; {rates}"
        dtypes = dict.fromkeys(str(v.dtype) for v in graph.weights if len(v.shape) > 1)
        names = dict.fromkeys((*dtypes, *(node.op for node in graph.nodes), OTHER_OPS))
        for backend in self.backends_by_kind.values():
            yield from (
                _describe_kernel_speed(backend, name, PRODUCTS if name in dtypes else name)
                for name in names
                if name in dtypes or name in backend.measured_hardware.op_bandwidth
                if backend.efficiencies is not None
            )


def _choose_slowest(
    figures: Sequence[tuple[Mapping[str, float], float]], slowest: Callable[[Iterable[float]], float]
) -> Mapping[str, float]:
    """Return for each cost class (op or dtype) the slowest figure of several kinds of devices.

    Args:
        figures: For each kind, its figures by cost class, and the figure of all other classes.
        slowest: `min` for speeds, `max` for seconds.
    """
    names = dict.fromkeys(name for by_class, _ in figures for name in by_class)
    return {name: slowest(by_class.get(name, other) for by_class, other in figures) for name in names}


def _describe_kernel_speed(backend: SimulatedBackend, name: str, family: str) -> str:
    """Return a line about the kernel speeds of a dtype or an op on one kind of device.

    Without a figure of its own it has the figure of `family`.
    """
    speeds, sheet = backend.measured_hardware, backend.data_sheet
    bandwidth = speeds.op_bandwidth.get(name, speeds.op_bandwidth[family])
    flops = speeds.op_flops.get(name, speeds.op_flops.get(family))
    tokens = " with few tokens" if flops else ""
    memory = f"{bandwidth / TERA:.3g} TB/s{tokens}, {bandwidth / sheet.bandwidth:.0%} of the data sheet"
    work = f"; {flops / TERA:.3g} TFLOP/s with many, {flops / sheet.flops:.0%}" if flops else ""
    return f"  {backend.kind}, {name}: {memory}{work}"


@validate_arguments(PlanError, text=TEXT)
def parse_simulated_group(text: str) -> SimulatedGroup:
    """Parse the description of a machine, such as ``h200:8,nvlink``, into a group of simulated devices.

    If the group has several kinds of devices, all devices have the lowest speeds.

    Args:
        text: One of three forms.
            - Devices and at most one link: ``h200:8,nvlink``, ``cpu:2`` or ``rtx4090:1,rtx3090:1,pcie4``.
            - Several such machines and the link between them: ``h200:8,nvlink x 4,ib400``.
            - The path of a file ``NAME.toml`` that describes them.

    Raises:
        PlanError: The text or the file is wrong; the message lists the known kinds and links.
    """
    path = Path(text)
    spec, catalogue = read_simulated_machine_file(path) if path.suffix == ".toml" else (text, CATALOGUE)
    return _parse_machines_and_links(spec, catalogue)


def _parse_machines_and_links(text: str, known: DeviceAndLinkCatalogue) -> SimulatedGroup:
    """Parse a description such as ``h200:8,nvlink`` (one machine) or ``h200:8,nvlink x 4,ib400`` (four machines)."""
    machine, times, rest = text.partition(" x ")
    if not times:
        return _parse_equal_machines(text, text, 1, known)
    number, _, link = (part.strip() for part in rest.partition(","))
    if not re.fullmatch(r"[1-9]\d{0,2}", number, re.ASCII) or link not in known.links:
        raise PlanError(_describe_wrong_machine_text(text, rest, known))
    one = _parse_equal_machines(text, machine, int(number), known)
    across = known.links[link]
    hardware = replace(
        one.hardware,
        machine=len(one.group) // int(number),
        across_bandwidth=across.bandwidth,
        across_latency=across.latency,
    )
    return replace(one, hardware=hardware)


def _parse_equal_machines(
    text: str, description: str, machine_count: int, known: DeviceAndLinkCatalogue
) -> SimulatedGroup:
    """Parse the description of one machine, and return a group of `machine_count` equal machines.

    Args:
        text: The whole description, for messages.
        description: The part about one machine, such as ``h200:8,nvlink``.
        machine_count: The number of equal machines.
        known: The known kinds of devices and links.
    """
    counts: dict[str, int] = {}
    links: list[str] = []
    for part in description.split(","):
        kind, _, number = part.strip().partition(":")
        if kind in known.links and not number:
            links.append(kind)
        elif kind in known.data_sheets and re.fullmatch(r"|[1-9]\d{0,2}", number, re.ASCII):
            counts[kind] = counts.get(kind, 0) + int(number or 1)
        else:
            raise PlanError(_describe_wrong_machine_text(text, part, known))
    if not counts or len(links) > 1 or machine_count * sum(counts.values()) > MAX_SIMULATED_DEVICES:
        raise PlanError(_describe_wrong_machine_text(text, text, known))
    backends = {kind: build_simulated_backend(kind, known.data_sheets[kind]) for kind in counts}
    group = tuple(
        (backends[kind], backends[kind].device(machine * n + i))
        for machine in range(machine_count)
        for kind, n in counts.items()
        for i in range(n)
    )
    host = build_simulated_backend("cpu")
    hardware = _build_slowest_hardware([known.data_sheets[kind] for kind in counts], links, known)
    return SimulatedGroup(
        group, hardware, (host, host.device(0)), _build_slowest_hardware([host.data_sheet], HOST_LINK, known)
    )


def _build_slowest_hardware(
    data_sheets: Sequence[DataSheet], links: Sequence[str], known: DeviceAndLinkCatalogue
) -> Hardware:
    """Build the hardware model of a mixed group: for each speed the slowest figure of its kinds and links.

    Args:
        data_sheets: The data sheet of each kind of device.
        links: Names of links; if empty, the default links of the kinds are used.
        known: The known kinds of devices and links.
    """
    joined = [known.links[name] for name in (links or [sheet.link for sheet in data_sheets])]
    return Hardware(
        flops=min(sheet.flops for sheet in data_sheets),
        bandwidth=min(sheet.bandwidth for sheet in data_sheets),
        launch=max(sheet.launch for sheet in data_sheets),
        link_bandwidth=min(link.bandwidth for link in joined),
        link_latency=max(link.latency for link in joined),
        source=BUILT_IN_SOURCE if DATA_SHEETS["cpu"] in data_sheets else DATA_SHEET_SOURCE,
    )


def _describe_wrong_machine_text(text: str, part: str, known: DeviceAndLinkCatalogue) -> str:
    """Return the error message for a machine description that cannot be parsed.

    Args:
        text: The whole description.
        part: The wrong part of it.
        known: The known kinds of devices and links.
    """
    return (
        f"cannot simulate {text[:80]!r} (at {part[:80]!r}); give kinds with numbers and at most one link, as "
        f"h200:8,nvlink, and how many such machines with what link, as h200:8,nvlink x 4,ib400; "
        f"{MAX_SIMULATED_DEVICES} devices at most; kinds: {', '.join(known.data_sheets)}; "
        f"links: {', '.join(known.links)}"
    )


if not TYPE_CHECKING:
    __getattr__ = make_module_getattr(globals(), simulate="parse_simulated_group")
