"""The processor that kernels are compiled for: this machine's, or a lesser one.

``HOCKET_WITHOUT=avx512,avxvnni`` leaves out every feature whose name begins so: kernels run as they would where the
processor lacks them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

import llvmlite.binding as llvm


@cache
def features() -> Mapping[str, bool]:
    """What LLVM calls the processor's features, and whether kernels may use them."""
    without = tuple(name for name in os.environ.get("HOCKET_WITHOUT", "").split(",") if name)
    host = llvm.get_host_cpu_features()
    return MappingProxyType({n: there and not n.startswith(without) for n, there in host.items()})


def name() -> str:
    return str(llvm.get_host_cpu_name())


def flattened() -> str:
    """Features as LLVM reads them."""
    return ",".join(f"{'+' if there else '-'}{name}" for name, there in features().items())
