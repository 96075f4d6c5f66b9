"""What can go wrong, by who has to act: the author of a graph, of a plan, or of a backend."""


class HocketError(Exception):
    """Base of every error hocket raises on purpose; its message is one line: who, got, need, do."""


class GraphError(HocketError):
    """A graph breaks a rule: shapes, dtypes, names, order, state updates."""


class PlanError(HocketError):
    """A graph cannot be planned, or a plan breaks a rule of its verifier."""


class BackendError(HocketError):
    """A device cannot do what it was asked: missing, out of memory, a kernel that failed."""


class StepError(BackendError):
    """An instruction failed: the node it runs, the device, and how many instructions had finished there before it.

    Where instructions run in another order than that of their program, `finished` are the positions of those that had.
    """

    node: str
    device: str
    finished_instructions: int | frozenset[int]

    def __init__(self, node: str, device: str, finished: int | frozenset[int], why: str) -> None:
        super().__init__(f"%{node} on {device}: {why}")
        self.node, self.device, self.finished_instructions = node, device, finished
