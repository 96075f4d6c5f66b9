"""The errors of hocket, by their cause: a graph, a plan or a backend."""


class HocketError(Exception):
    """The base class of all errors that hocket raises on purpose.

    The message is one line: the subject, the value that was found, the value that is needed, and a remedy.
    """


def format_install_command(extra: str) -> str:
    """Return the command that installs an optional dependency of hocket; no package index has hocket."""
    return f'run python -m pip install -e ".[{extra}]" in a clone of hocket'


class GraphError(HocketError):
    """An error in a graph: it breaks a rule about shapes, dtypes, names, node order or state updates."""


class PlanError(HocketError):
    """An error of planning or running: a graph cannot be planned, an argument is wrong, or a plan is invalid."""


class BackendError(HocketError):
    """An error of a backend or a device: it is missing, is out of memory, or failed in a kernel."""


class DeviceLostError(BackendError):
    """The error that a device refuses all calls of this process, as after an illegal address on a GPU.

    Only a new process can use the device again.
    """


class StatesLostError(BackendError):
    """The error that states are lost, because a run over them could not be undone.

    Args:
        message: The problem.
        is_of_earlier_run: Whether an earlier run has lost them, perhaps one of another caller. This run has not begun.
        can_begin_anew: Whether their memory can be used again after it is set to zeros. A device that has not stopped
            may still write to it.
    """

    def __init__(self, message: str, *, is_of_earlier_run: bool = False, can_begin_anew: bool = True) -> None:
        super().__init__(message)
        self.is_of_earlier_run, self.can_begin_anew = is_of_earlier_run, can_begin_anew


class StepError(BackendError):
    """An error in one instruction of a device program; the message names the node and the device.

    Args:
        node: The name of the node that the instruction computes.
        device: The name of the device.
        finished_instructions: The number of instructions that the device had finished. A device that does not follow
            the order of its program gives the positions of the finished instructions instead.
        reason: The problem.
    """

    node: str
    device: str
    finished_instructions: int | frozenset[int]

    def __init__(self, node: str, device: str, finished_instructions: int | frozenset[int], reason: str) -> None:
        super().__init__(f"%{node} on {device}: {reason}")
        self.node, self.device, self.finished_instructions = node, device, finished_instructions


def format_count(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun: ``1 axis``, ``2 axes``. The plural is the noun with an s if none is given."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"
