"""The errors of hocket, by their cause: a graph, a plan or a backend."""


class HocketError(Exception):
    """The base of all errors that hocket raises on purpose. The message is one line: subject, value, need, remedy."""


class GraphError(HocketError):
    """A graph breaks a rule: shapes, dtypes, names, order, state updates."""


class PlanError(HocketError):
    """A graph cannot be planned, or a plan breaks a rule of its verifier."""


class BackendError(HocketError):
    """A device is missing, is out of memory, or has a kernel that failed."""


class StepError(BackendError):
    """An instruction of a device failed.

    Args:
        node: The name of the node that the instruction computes.
        device: The name of the device.
        finished_instructions: The number of instructions that the device had finished. A device that runs
            instructions in another order than its program gives the positions of the finished instructions.
        reason: The problem.
    """

    node: str
    device: str
    finished_instructions: int | frozenset[int]

    def __init__(self, node: str, device: str, finished_instructions: int | frozenset[int], reason: str) -> None:
        super().__init__(f"%{node} on {device}: {reason}")
        self.node, self.device, self.finished_instructions = node, device, finished_instructions
