"""A Numba target that translates Python functions to LLVM modules, and emits no machine code.

`compiler` emits the machine code of a kernel from its LLVM module. Numba's CPU target would also emit machine code of
each kernel and of each subroutine, which nothing runs; that takes a fifth of the compile time. Everything else is as in
Numba's CPU target. `LlvmTarget` inherits from `CPU`, so the overloads that Numba has for the CPU apply to it
(https://numba.readthedocs.io/en/stable/extending/).
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from numba.core import ccallback, codegen, cpu, dispatcher, registry, sigutils, target_extension
from numba.core.runtime import rtsys
from numba.core.utils import threadsafe_cached_property

TARGET_NAME = "hocket_llvm"


class ModuleLibrary(codegen.JITCodeLibrary):
    """A library with an optimised LLVM module and no machine code; the address of a function is 0."""

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0

    def _finalize_specific(self) -> None:
        """Emit no machine code of the module."""


class ModuleCodegen(codegen.JITCPUCodegen):
    """A code generator that compiles nothing with its execution engine."""

    _library_class = ModuleLibrary

    def _add_module(self, module: object) -> None:
        """Do not add the module to the execution engine."""


class ModuleContext(cpu.CPUContext):
    """The context in which Numba lowers functions to LLVM modules."""

    def init(self) -> None:
        super().init()
        self._internal_codegen = ModuleCodegen(TARGET_NAME)

    def load_additional_registries(self) -> None:
        """Load the registries of the CPU target, after Numba's runtime has been compiled by the CPU target itself."""
        rtsys.initialize(registry.cpu_target.target_context)
        super().load_additional_registries()

    def get_executable(self, library: object, fndesc: object, env: object) -> object:
        """Return a new key for the lowered function, in place of its entry point."""
        return object()


class LlvmTargetDescriptor(registry.CPUTarget):
    """The contexts of the target, and the options of Numba's CPU target."""

    @threadsafe_cached_property
    def _toplevel_target_context(self) -> ModuleContext:
        return ModuleContext(self.typing_context, self._target_name)


TARGET = LlvmTargetDescriptor(TARGET_NAME)


class NumbaSubroutine(dispatcher.Dispatcher):
    """A Python function that compiled functions of this target call."""

    targetdescr = TARGET

    def add_overload(self, cres: Any) -> None:
        """Store the result of a compilation; a call from Python finds none."""
        self.overloads[tuple(cres.signature.args)] = cres


class EntryPoint(ccallback.CFunc):
    """A Python function with the calling convention of C."""

    _targetdescr = TARGET


class LlvmTarget(target_extension.CPU):
    """The class that stands for this target in Numba's registries."""


def make_numba_subroutine(body: FunctionType, **options: Any) -> NumbaSubroutine:
    """Return `body` as an object that compiled functions call.

    Args:
        body: The Python function.
        options: The options of Numba's ``njit``.
    """
    return NumbaSubroutine(body, targetoptions={"nopython": True, **options})


def translate_to_llvm_assembly(body: FunctionType, signature: str, name: str, **options: Any) -> str:
    """Translate a Python function to optimised LLVM assembly.

    Args:
        body: The Python function.
        signature: The types of its result and arguments, as in Numba's ``cfunc``.
        name: The symbol of the function in the assembly, which has the calling convention of C.
        options: The options of Numba's ``cfunc``.
    """
    entry_point = EntryPoint(body, sigutils.normalize_signature(signature), {}, options)
    with target_extension.target_override(TARGET_NAME):
        entry_point.compile()
    return str(entry_point.inspect_llvm().replace(entry_point.native_name, name))


def _make_subroutine_decorator(**options: Any) -> Callable[[FunctionType], NumbaSubroutine]:
    """Return the decorator that Numba uses to compile its own overloads for this target."""
    return lambda body: make_numba_subroutine(body, **options)


target_extension.target_registry[TARGET_NAME] = LlvmTarget
target_extension.dispatcher_registry[LlvmTarget] = NumbaSubroutine
target_extension.jit_registry[LlvmTarget] = _make_subroutine_decorator
