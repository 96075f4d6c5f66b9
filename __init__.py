"""hocket: a compute-graph compiler with a backend scheduler, which distributes one graph over several devices.

Build a graph from leaves (`input`, `weight`, `state`, `constant`) and ops (`hocket.ops`). `plan` it for devices, `load`
the plan with weights, and `run` it with inputs. `Model` runs a language model.
"""

import os
import sys
from importlib import import_module
from typing import Any

from .moved_modules import MovedModuleFinder

__version__ = "0.2.0"

LAZY_NAMES = {
    **dict.fromkeys(("BackendError", "GraphError", "HocketError", "PlanError"), ".graph"),
    **dict.fromkeys(("DType", "Graph", "Node", "Spec", "Value", "constant", "input", "state", "weight"), ".graph"),
    **dict.fromkeys(("from_json", "to_json", "to_networkx"), ".graph"),
    **dict.fromkeys(("register", "verify"), ".ops"),
    **dict.fromkeys(("dump", "parse"), ".ops.text"),
    **dict.fromkeys(("Executor", "Plan", "Store", "Trace", "load", "plan", "run"), ".scheduler"),
    "Model": ".frontends.language_model",
    **dict.fromkeys(("Completion", "Token"), ".frontends.completion"),
    "Options": ".frontends.generation.options",
    "ModelError": ".frontends.errors",
    "Sampling": ".frontends.generation.sampling",
    "to_dot": ".view.dot",
    "from_onnx": ".frontends.onnx.importer",
    "from_torch": ".frontends.torch.importer",
    "graph": ".graph",
    "ops": ".ops",
    "scheduler": ".scheduler",
}
"""The module of each public name, which is imported at the first use of the name; `docs/write_stubs.py` writes a stub.

A command thus imports only the modules that it needs, and none before it has configured them.
"""


sys.meta_path.append(MovedModuleFinder())

if os.environ.keys() & {"PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"}:  # one of several processes, perhaps
    from .distributed.presence import create_exit_reason_file

    create_exit_reason_file()


def __getattr__(name: str) -> Any:
    if name == "__all__":  # of `from hocket import *`
        return [*LAZY_NAMES]
    if name not in LAZY_NAMES:
        from .graph.validation import did_you_mean

        raise AttributeError(f"module 'hocket' has no attribute {name!r}{did_you_mean(name, __dir__())}")
    module = import_module(LAZY_NAMES[name], __name__)
    value = globals()[name] = module if LAZY_NAMES[name] == f".{name}" else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted(
        {*globals(), *LAZY_NAMES}
        - {
            "Any",
            "LAZY_NAMES",
            "import_module",
            "create_exit_reason_file",
            "os",
            "sys",
            "MovedModuleFinder",
        }
    )
