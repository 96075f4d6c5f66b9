"""Optional capability protocols of backends and of compiled programs; callers test for them with `isinstance`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from ..graph.errors import DeviceLostError
from ..graph.lazy_dataclass import dataclass
from ..graph.node import Node
from ..graph.spec import Spec
from .base import Array, Backend, Device, Program, Tensor


@runtime_checkable
class DeclaresTolerance(Protocol):
    """A backend that declares the relative error of kernels which are less exact than float32."""

    def tolerance(self, node: Node) -> float | None:
        """Return the relative error of one operation of `node`, such as 2**-8 for 8-bit rounding.

        The result is None for float32.
        """


@runtime_checkable
class SupportsExactMode(Protocol):
    """A backend that rounds activations in products with quantised weights, unless the caller asks for float32."""

    def with_float32_matmuls(self) -> Backend:
        """Return a backend for the same devices that computes every matrix product in float32."""


@runtime_checkable
class SupportsDeviceClasses(Protocol):
    """A backend that reports which devices are equal, so that support is tested for only one device of each class."""

    def classify_device(self, on: Device) -> Hashable:
        """Return a key that is equal for all devices of one class: devices that can run the same nodes."""


@runtime_checkable
class CanLoseDevices(Protocol):
    """A backend with devices that may refuse all further calls of this process after a fault, as GPUs do."""

    def find_device_loss(self, on: Device) -> str:
        """Return the error that all calls of a device give from now on, or an empty text if it works.

        The call does not wait for the device.
        """


def require_no_lost_device(group: Iterable[tuple[Backend, Device]]) -> None:
    """Raise `DeviceLostError` if a device of a group refuses all further calls of this process."""
    for backend, device in group:
        if isinstance(backend, CanLoseDevices) and (why := backend.find_device_loss(device)):
            raise DeviceLostError(f"{device} refuses all calls of this process: {why}; start the process anew")


def find_class_of_equal_devices(backend: Backend, on: Device) -> Hashable:
    """Return a key that is equal for devices that can run the same nodes.

    A backend without device classes gives each device its own key.
    """
    return id(backend), backend.classify_device(on) if isinstance(backend, SupportsDeviceClasses) else str(on)


@runtime_checkable
class SupportsTransports(Protocol):
    """A backend with devices that can communicate over several transports, such as peer memory or host memory."""

    def describe_transport(self, devices: Sequence[Device]) -> str:
        """Describe how these devices communicate and why, as a phrase such as "through memory of the host"."""


@runtime_checkable
class SupportsPlanCache(Protocol):
    """A backend that allows plans to be cached: its answers depend only on its source, settings and device."""

    def describe_settings(self) -> str:
        """Return a text of the settings with which the backend was created, such as the thread count."""


@runtime_checkable
class PacksWeights(Protocol):
    """A backend that packs quantised weights into host memory, which may be mapped from a file."""

    def compute_packing_id(self) -> str:
        """Return an identifier of the packed form: if it is equal, a weight has the same packed bytes."""


@runtime_checkable
class SupportsPiecewiseLoading(Protocol):
    """A backend that can load a large weight slice by slice, so that only a few bytes of the file are in memory."""

    def split_weight(self, data: Array, declared: Spec, buffer: Any) -> Iterable[tuple[Array, Spec, Any]]:
        """Split a weight into slices, and yield (data, spec, buffer) of each slice as arguments of `load`.

        Loading all slices has the same effect as loading the weight at once.

        Args:
            data: The weight in the form of a model file.
            declared: Spec of the weight in the graph.
            buffer: Buffer of the whole weight.
        """


@runtime_checkable
class SupportsZeroCopyWeights(Protocol):
    """A backend that can read a weight in the memory of the caller, without a copy."""

    def as_buffer(self, data: Array, declared: Spec) -> Any | None:
        """Return the memory of `data` as a buffer without a copy; None if the backend stores it in another form."""


@runtime_checkable
class HasRowIndependentProducts(Protocol):
    """A backend that can make a row of a matrix product independent of the number of rows, bit by bit."""

    def has_row_independent_products(self) -> bool:
        """Return whether matrix products on this machine give a row the same bits for any number of rows."""


@runtime_checkable
class SupportsThreads(Protocol):
    """A backend that runs kernels on threads of this machine."""

    threads: int
    """Thread count of each device."""


@runtime_checkable
class HasSeparateMemory(Protocol):
    """A backend of devices with a memory of their own. The host waits for each copy of an output."""

    has_separate_memory: bool
    """Always true; a backend without such devices lacks the attribute."""


@runtime_checkable
class SupportsBatchedWrites(Protocol):
    """A backend that writes several host arrays to device memory by one large copy, faster than by small copies."""

    def make_writer(self, buffers: Sequence[Any], tensors: Sequence[Tensor]) -> Callable[[Sequence[Array]], None]:
        """Return a function that writes one host array to each of these tensors, before later runs.

        The function may overwrite bytes between the tensors, up to the next multiple of `ALIGNMENT`. The caller may
        reuse its arrays as soon as the function returns.
        """


@runtime_checkable
class SupportsReturnedOutputs(Protocol):
    """A compiled program that can copy outputs to the host as part of the run."""

    def make_runner_with_outputs(self, tensors: Sequence[Tensor]) -> Callable[[], Sequence[Array]]:
        """Return a function that runs the program once and returns `tensors` as new host arrays."""


@runtime_checkable
class SupportsLaunchAhead(Protocol):
    """A compiled program that can be launched before the host has read the outputs of earlier launches."""

    def make_starter_with_outputs(self, tensors: Sequence[Tensor]) -> Callable[[], Callable[[], Sequence[Array]]]:
        """Return a function that starts a run, and returns a function that waits for its end.

        The second function returns `tensors` as new host arrays. Runs and host writes take effect in the order of their
        start. So the arrays have the results of this run, also if later runs have started.
        """


@dataclass(frozen=True, slots=True)
class TimedKernel:
    """A kernel of one run: the positions of its instructions, and its start and end in seconds of `time.monotonic`.

    If a kernel waits for other devices, the wait counts as time of that kernel.
    """

    kernel: str
    instruction_numbers: tuple[int, ...]
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@runtime_checkable
class SupportsTiming(Protocol):
    """A compiled program that can report the kernels of a run and their times."""

    def kernels(self) -> list[str]:
        """Return the names of the kernels that a run calls, in order.

        An instruction without a compiled kernel, which NumPy computes, has the name `STAND_IN`.
        """

    def run_timed(self) -> Iterable[TimedKernel]:
        """Run the program once and return the start and end time of each kernel.

        It raises the same errors as a run without timing. The times may be read after the next run has begun.
        """


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """The file and line of a kernel's source, such as ``hocket/cli.py:12``, and its text, which is empty if long."""

    file_and_line: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One call of a kernel by a program.

    It has the name of the kernel, its source, and the positions of its instructions. `launches` is the number of
    launches that predictions count. It is above 1 for a generated kernel of several ops, because the search for a plan
    knows no such kernels and prices each op alone.
    """

    kernel: str
    source: SourceLocation
    instruction_numbers: tuple[int, ...]
    launches: int = 1


STAND_IN = "NumPy"
"""Kernel name of an instruction that NumPy computes, because the backend has no compiled kernel for the instruction."""


@runtime_checkable
class ListsKernels(Protocol):
    """A backend that can list the kernels of a program without memory for the program."""

    def list_kernels(self, program: Program, on: Device) -> Sequence[KernelCall]:
        """Return the kernel calls of one run in order.

        Kernels of collectives are left out if they depend on the other devices of a group.
        """


@runtime_checkable
class ReportsFusion(Protocol):
    """A backend that reports which instructions it fuses; the planner uses this to distribute a graph over devices.

    Whether the backend fuses instructions depends on the memory layout of their values.
    """

    def list_fused_groups(self, program: Program, on: Device) -> Sequence[Sequence[int]]:
        """Return the positions of the instructions in the order of a run; fused instructions are one entry."""


@dataclass(frozen=True, slots=True)
class FusedExpression:
    """Instructions that one generated kernel computes, and the expression that it evaluates.

    The kernel evaluates the expression at each index of `shape`, and reduces rows along the last axis. A box is a
    sub-range of `shape` along each axis. For example, each operand of a concatenation is read in a box of its own.

    Attributes:
        instruction_numbers: the instructions, ascending.
        steps: the steps of the expression in the scalar language: function, numbers of earlier steps, value. An operand
            has its index in `operands` as value, an attribute has a key of `attributes`.
        attributes: the numbers of the call.
        shape: the shape.
        operands: the operands as views with this shape; a repeated axis has stride 0. If a step reads an
            operand in a box, the operand has only the elements of the box.
        results: the step of each result and its place, a view with this shape, or one column for a number per row.
        saved_bytes: bytes of memory traffic that single kernels would move in addition.
        boxes: for each box the first and the end index along each axis of the shape. A step with the function
            ``inside`` tests whether an index is in a box, and has the number of the box as value.
    """

    instruction_numbers: tuple[int, ...]
    steps: tuple[tuple[str, tuple[int, ...], int | str], ...]
    attributes: Mapping[str, float]
    shape: tuple[int, ...]
    operands: tuple[Tensor, ...]
    results: tuple[tuple[int, Tensor], ...]
    saved_bytes: int = 0
    boxes: tuple[tuple[tuple[int, int], ...], ...] = ()


@dataclass(frozen=True, slots=True)
class HookedKernel:
    """A kernel with fused epilogues: generated kernels that process each panel of its result in the cache.

    A panel is some rows by some columns. The first stage is the body, such as a matmul: an instruction, or several
    with one hand-written kernel. The last instruction of the body has a dense float32 result.
    Each other stage (hook) is a generated kernel (`FusedExpression`), which computes the elements of the
    panel as soon as the earlier stages have computed theirs. Panels may be computed in any order and by any thread.

    Attributes:
        stages: the instructions of each stage, ascending.
        panel_columns: each panel begins at a multiple of this number of columns, and has a multiple of it.
    """

    stages: tuple[tuple[int, ...], ...]
    panel_columns: int


@dataclass(frozen=True, slots=True)
class ProgramFusion:
    """How a backend runs a program: its instructions in the order of a run, and the generated kernels.

    `order` has one entry for each group of instructions that run together; single instructions are groups of one. The
    instructions of a `HookedKernel` are one group. An entry of `joined` has groups that run one after the other as one
    step; `order` has one entry for all of them.
    """

    order: tuple[tuple[int, ...], ...]
    expressions: tuple[FusedExpression, ...]
    hooked: tuple[HookedKernel, ...] = ()
    joined: tuple[tuple[tuple[int, ...], ...], ...] = ()


@runtime_checkable
class GeneratesFusedKernels(Protocol):
    """A backend that generates kernels for groups of instructions; the verifier of plans compares them with the ops."""

    def describe_fusion(self, program: Program) -> ProgramFusion:
        """Return the order and the generated kernels with which the backend runs a program on any of its devices."""

    def has_cached_binding(self, program: Program) -> bool:
        """Return whether the binding of a program is cached.

        A cached binding was written after the kernels had been verified.
        """


@runtime_checkable
class SupportsOverlap(Protocol):
    """A backend with devices that may run other instructions while a collective waits or transfers data."""

    def can_overlap_collectives(self, devices: Sequence[Device]) -> bool:
        """Return whether these devices can run independent instructions during a collective (``fusion/overlap.py``)."""


def can_group_overlap(group: Sequence[tuple[Backend, Device]]) -> bool:
    """Return whether the devices of a group can run independent instructions during a collective.

    The answer is no for devices of several backends: they communicate through host memory, and all of them wait.
    """
    first = group[0][0]
    is_one = all(type(backend) is type(first) for backend, _ in group)
    return (
        is_one and isinstance(first, SupportsOverlap) and first.can_overlap_collectives([device for _, device in group])
    )


OTHER_OPS = "others"
"""Key of all ops that have no entry of their own and read no weights."""


@dataclass(frozen=True, slots=True)
class KernelEfficiencies:
    """The measured efficiencies of kernel families, as factors of a data sheet.

    Keys are cost classes: an op, the dtype of the weights of a product, or `OTHER_OPS` for everything else.

    Attributes:
        measured_on: The kinds of devices that were measured. For other kinds the factors are an estimate.
        memory: Shares of the memory bandwidth.
        arithmetic: Shares of the FLOP/s.
        launch: The seconds of a launch in a graph, as multiples of the launch time of the data sheet.
    """

    measured_on: tuple[str, ...]
    memory: Mapping[str, float]
    arithmetic: Mapping[str, float]
    launch: Mapping[str, float]


@runtime_checkable
class SupportsSimulation(Protocol):
    """A backend that can simulate absent devices, so that plans can be made for them."""

    def make_simulated_backend(self, model: str) -> Backend:
        """Make a backend for absent devices of `model`, which answers questions of the planner but runs no program."""

    def read_kernel_efficiencies(self) -> KernelEfficiencies:
        """Return the efficiencies of the kernels of this backend."""
