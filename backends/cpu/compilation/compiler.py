"""Compilation of kernels written in Python: Numba and LLVM generate machine code once per machine, and files cache it.

A warm start imports neither Numba nor, on x86-64, LLVM. The name of a cache file is a hash of all kernel sources, the
processor and the versions of the compilers, so stale code never runs.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import CellType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import llvmlite
from llvmlite import ir

from ....graph.lazy_dataclass import dataclass
from ....graph.old_names import make_module_getattr
from ....graph.storage.disk_cache import cache_folder, hash_key_to_file_name, read_cached, write_cached
from ...compile_log import log_compilation, log_number_of_kernels_to_compile
from ...thread_safe_cache import thread_safe_cache
from .. import target_cpu
from ..simd.vectors import ADDRESS, DOUBLE, FLOAT, FOREIGN_PREFIX, NOTHING, Intrinsic, llvm_type
from . import object_loader
from .complete_code import require_complete_code
from .kernel_args import KernelArgs

if TYPE_CHECKING:
    import llvmlite.binding as llvm

KernelBody = Callable[..., Any]
ALIGNMENT = 64
"""Alignment in bytes of all data that kernels access: one vector, which is also a cache line."""


@dataclass(frozen=True, slots=True)
class Subroutine:
    """A Python function that kernels call in compiled code; the compiler inlines it."""

    body: KernelBody

    def __call__(self, *values: Any) -> Any:
        raise TypeError("a part runs in compiled kernels only")


@dataclass(frozen=True, eq=False)
class IrBody:
    """A kernel body that is emitted as LLVM IR, without Numba.

    `emit` gets the empty LLVM function ``(arguments, thread, threads) -> status`` and writes its code. The name of the
    kernel needs a digest of everything outside the kernel sources that the code depends on. `source` is the Python
    function that reports show as the source of the kernel.
    """

    emit: Callable[[ir.Function], None]
    source: Callable[..., Any]


@dataclass(frozen=True)
class Kernel:
    """A Python function ``body(arguments, thread, threads) -> status`` that is compiled and runs on all threads.

    Each thread of a device does its part of the work. `arguments` is the address of a block of 64-bit words. The status
    is 0 unless the run has to stop. Kernels with equal names are the same kernel.
    """

    name: str
    body: KernelBody | IrBody = field(compare=False)

    @property
    def address(self) -> int:
        return _load_kernel(self)[0]


def subroutine(body: KernelBody) -> Subroutine:
    return Subroutine(body)


def kernel(body: KernelBody) -> Kernel:
    module = body.__module__
    return Kernel(f"{module.rpartition('.')[2] if _is_builtin(body) else module}.{body.__name__}", body)


_compile_lock = threading.RLock()


@cache
def _register_wait_for_compilation_at_exit() -> None:
    """Register that the interpreter waits at exit for a running compilation, and starts no compilation after that.

    A daemon thread may compile when the main thread ends. LLVM aborts the process if its objects are freed meanwhile.
    The first compilation calls this function, because callbacks at exit run in reverse order and llvmlite has its own.
    """
    atexit.register(_compile_lock.acquire)


@thread_safe_cache
def _load_kernel(definition: Kernel) -> tuple[int, object]:
    """Load a kernel and return its address and an object that keeps its code alive; compile it if it is not cached."""
    with _compile_lock:
        code = _read_shipped_or_cached_code(definition)
        if code is None and definition.body is _raise_for_unknown_kernel_body:
            raise LookupError(definition.name)
        return _load_object_code(definition, code or _compile_and_cache(definition))


def _load_object_code(definition: Kernel, code: bytes) -> tuple[int, object]:
    """Load object code, and return the address of the kernel and an object that keeps the code alive.

    `object_loader` loads the code if it can; otherwise LLVM does. Each kernel then has an execution engine of its own,
    because LLVM mixes up the offset tables of several objects in one engine. The empty module of a new engine is
    removed, because its compilation takes ten times as long as all other work.
    """
    if object_loader.is_loadable_x86_64_code(code):
        return object_loader.load_function(code, _make_symbol_name(definition)), None
    import llvmlite.binding as llvm

    _initialise_llvm(llvm.get_default_triple())
    module, machine = llvm.parse_assembly(""), llvm.Target.from_default_triple().create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.remove_module(module)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return int(engine.get_function_address(_make_symbol_name(definition))), (engine, module, code)


def compile_missing_kernels(kernels: Iterable[Kernel]) -> None:
    """Compile the kernels that are not cached, after logging how many there are."""
    missing = [k for k in dict.fromkeys(kernels) if (k,) not in _load_kernel and not _is_cached(k)]
    if missing:
        with log_number_of_kernels_to_compile(len(missing)):
            for definition in missing:
                _load_kernel(definition)


def find_cached_kernel_addresses(names: Sequence[str]) -> Mapping[str, int] | None:
    """Return the addresses of kernels of this package by name; None if the code of any kernel is not cached."""
    try:
        return {name: Kernel(name, _raise_for_unknown_kernel_body).address for name in names}
    except LookupError:
        return None


def _raise_for_unknown_kernel_body(a: int, thread: int, threads: int) -> int:
    """Raise an error: a placeholder body for a kernel that is known by name and must come from the cache."""
    raise LookupError("it is never compiled")


def _make_symbol_name(definition: Kernel) -> str:
    return "hocket." + definition.name


def _create_target_machine() -> llvm.TargetMachine:
    """Make an LLVM target machine for the compile target.

    Each engine needs a new target machine, because the engine disposes of it.
    """
    import llvmlite.binding as llvm

    target = target_cpu.find_host_or_requested_target()
    _initialise_llvm(target.triple)
    return llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu, features=target.format_llvm_features(), opt=3, reloc="pic", codemodel="jitdefault", jit=True
    )


@cache
def _initialise_llvm(triple: str) -> None:
    import llvmlite.binding as llvm

    if triple == llvm.get_default_triple():
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
    else:  # which takes 8 MB
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()


# ------------------------------------------------------------------------------------------------- stored code


PRECOMPILED_FOLDER = Path(__file__).parents[1] / "compiled"
"""Folder of kernels that came with the package or were compiled at installation, with one folder for each target."""


@cache
def _digest_kernel_sources() -> bytes:
    """Return the digest of the source files of all kernels and of the kernel compiler."""
    cpu = Path(__file__).parents[1]
    folders = ("compilation", "kernels", "simd", "steps")
    sources = sorted([cpu / "target_cpu.py", *(path for folder in folders for path in (cpu / folder).rglob("*.py"))])
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.read_bytes())
    return digest.digest()


def _read_numba_version_from_metadata_folder() -> str:
    """Return the version of Numba from the name of its metadata folder.

    An import of Numba or of package metadata takes longer.
    """
    spec = find_spec("numba")
    beside = sorted(Path(spec.origin).parents[1].glob("numba-*.dist-info")) if spec and spec.origin else []
    if len(beside) == 1:
        return beside[0].name
    from importlib.metadata import version

    return version("numba")


def compute_kernel_code_digest() -> bytes:
    """Return a digest of everything that affects kernel code and argument words: sources, target and compilers."""
    return _digest_kernel_sources() + _make_fingerprint_without_sources()


@cache
def _make_fingerprint_without_sources() -> bytes:
    """Return the target, platform and compiler versions as bytes: all inputs of kernel code except the sources."""
    where = (target_cpu.find_host_or_requested_target(), target_cpu.find_native_or_emulated_amx(), sys.platform)
    return repr((*where, _read_numba_version_from_metadata_folder(), llvmlite.__version__)).encode()


def _find_kernel_cache_file(definition: Kernel) -> Path | None:
    """Return the cache file of the compiled kernel. The result is None for a kernel without a source file."""
    body = definition.body
    try:
        if isinstance(body, IrBody) or _is_builtin(body):
            outside = b""
        else:
            outside = _read_third_party_source(body.__code__.co_filename)
    except OSError:
        return None
    return cache_folder() / "kernels" / _make_cache_file_name(definition, outside + _make_fingerprint_without_sources())


def _make_cache_file_name(definition: Kernel, besides: bytes = b"") -> str:
    return hash_key_to_file_name(_digest_kernel_sources(), besides, definition.name) + ".o"


def _is_builtin(body: KernelBody | IrBody) -> bool:
    return body.__module__.startswith(f"{__package__.rpartition('.')[0]}.")


@cache
def _read_third_party_source(file: str) -> bytes:
    """Read the source file of a kernel of another package. Changes in files that it imports stay unnoticed."""
    return Path(file).read_bytes()


def _list_compiled_kernel_files(definition: Kernel) -> Iterator[Path]:
    """Yield the files that may hold compiled code of a kernel for this processor.

    The most specific file comes first.
    """
    shipped = (
        [
            PRECOMPILED_FOLDER / target.name / _make_cache_file_name(definition)
            for target in target_cpu.list_runnable_precompiled_targets()
        ]
        if _is_builtin(definition.body)
        else []
    )
    yield from shipped[:1]
    if file := _find_kernel_cache_file(definition):
        yield file
    yield from shipped[1:]


def _read_shipped_or_cached_code(definition: Kernel) -> bytes | None:
    """Read the code of a kernel that came with the package or that an earlier process cached, or return None."""
    return next(
        (code for file in _list_compiled_kernel_files(definition) if (code := read_cached(file)) is not None), None
    )


def _is_cached(definition: Kernel) -> bool:
    return any(file.exists() for file in _list_compiled_kernel_files(definition))


def compile_kernels_into_package(kernels: Iterable[Kernel]) -> int:
    """Compile kernels for the compile target into the package folder, and return the number of distinct kernels."""
    folder, unique_kernels = (
        PRECOMPILED_FOLDER / target_cpu.find_host_or_requested_target().name,
        [*dict.fromkeys(kernels)],
    )
    for one in unique_kernels:
        if read_cached(folder / _make_cache_file_name(one)) is None:
            write_cached(folder / _make_cache_file_name(one), _emit_object_code(one))
    return len(unique_kernels)


# --------------------------------------------------------------------------------------------------- compiling

NUMBA_OPTIONS: dict[str, Any] = {"error_model": "numpy", "fastmath": {"contract"}, "no_rewrites": True, "_nrt": False}
"""Numba's options for kernels, which use neither objects nor array expressions."""
SUBROUTINE_OPTIONS = {**NUMBA_OPTIONS, "forceinline": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""Numba's options for subroutines, which only kernels call."""


def _compile_and_cache(definition: Kernel) -> bytes:
    """Compile a kernel to object code, and cache the code for later processes."""
    with log_compilation(definition.name):
        code = _emit_object_code(definition)
        if file := _find_kernel_cache_file(definition):
            write_cached(file, code)
    return code


def _emit_object_code(definition: Kernel) -> bytes:
    """Compile a kernel to ELF object code for the compile target."""
    module, machine = _translate_to_llvm(definition)
    return bytes(machine.emit_object(module))


def _translate_to_llvm(definition: Kernel) -> tuple[llvm.ModuleRef, llvm.TargetMachine]:
    """Translate a kernel to an LLVM module, and return the module and the LLVM target machine for it."""
    import llvmlite.binding as llvm

    _register_wait_for_compilation_at_exit()
    machine = _create_target_machine()
    is_emitted = isinstance(definition.body, IrBody)
    assembly = _emit_llvm_assembly_of_ir_body(definition) if is_emitted else _translate_by_numba(definition)
    module = llvm.parse_assembly(assembly.replace(FOREIGN_PREFIX, ""))
    module.triple, module.data_layout = target_cpu.find_host_or_requested_target().triple, str(machine.target_data)
    module.verify()
    if is_emitted:
        builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
        builder.getModulePassManager().run(module, builder)
    return module, machine


def _emit_llvm_assembly_of_ir_body(definition: Kernel) -> str:
    """Emit the LLVM assembly (IR text) of a kernel that has an `IrBody`, without Numba."""
    assert isinstance(definition.body, IrBody)
    word, module = ir.IntType(64), ir.Module()
    definition.body.emit(ir.Function(module, ir.FunctionType(word, [word] * 3), _make_symbol_name(definition)))
    return str(module)


def _translate_by_numba(definition: Kernel) -> str:
    """Translate a kernel to optimised LLVM assembly by Numba."""
    from .numba_target import translate_to_llvm_assembly

    assert isinstance(definition.body, FunctionType)
    # A function that is not inlined has a wrapper that can raise. The wrapper needs symbols of Numba, which a warm
    # start does not have, and then not even the symbols of the system are bound.
    assembly = translate_to_llvm_assembly(
        _bind_names_to_numba_objects(definition.body),
        "intp(intp, intp, intp)",
        _make_symbol_name(definition),
        nogil=True,
        forceinline=True,
        **NUMBA_OPTIONS,
    )
    require_complete_code(definition.name, assembly)
    return assembly


def _bind_names_to_numba_objects(body: KernelBody) -> FunctionType:
    """Return a copy of `body` in which intrinsics and subroutines are replaced by objects that Numba can compile.

    Global names and closure cells of the copy refer to these objects.
    """
    assert isinstance(body, FunctionType)
    names = {**body.__globals__}
    for name in body.__code__.co_names:
        if name in names:
            names[name] = _to_numba(names[name])
    cells = tuple(CellType(_to_numba(cell.cell_contents)) for cell in body.__closure__ or ())
    return FunctionType(body.__code__, names, body.__name__, body.__defaults__, cells or None)


@cache
def _to_numba(thing: Any) -> Any:
    if isinstance(thing, Intrinsic):
        return _make_numba_intrinsic(thing)
    if isinstance(thing, Subroutine):
        from .numba_target import make_numba_subroutine

        return make_numba_subroutine(_bind_names_to_numba_objects(thing.body), **SUBROUTINE_OPTIONS)
    if isinstance(thing, KernelArgs):  # Numba reads attributes of a module while it compiles
        module = ModuleType("words")
        for name in (*thing.fields, *thing.parts):
            setattr(module, name, _to_numba(getattr(thing, name)))
        return module
    return thing


@cache
def _make_numba_type(name: str) -> Any:
    """Return the Numba type for a type name; vectors and tuples of vectors are Numba types of this module."""
    from numba import types
    from numba.extending import models, register_model

    known = {ADDRESS: types.intp, FLOAT: types.float32, DOUBLE: types.float64, NOTHING: types.void}
    if name in known:
        return known[name]
    kind = type(f"Vector_{name}", (types.Type,), {})

    def make(self: Any, manager: Any, front: Any) -> None:
        models.PrimitiveModel.__init__(self, manager, front, llvm_type(name))

    register_model(kind)(type(f"Model_{name}", (models.PrimitiveModel,), {"__init__": make}))
    return kind(name)


def _make_numba_intrinsic(declared: Intrinsic) -> Any:
    from numba.extending import intrinsic

    signature = _make_numba_type(declared.result)(*map(_make_numba_type, declared.operands))

    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        result = declared.body(builder, *values)
        return context.get_dummy_value() if declared.result == NOTHING else result

    return intrinsic(_WRAPPERS_BY_OPERAND_COUNT[len(declared.operands)]((signature, generate)))


# Numba reads the number of operands from the function, which therefore has to be written out.
_WRAPPERS_BY_OPERAND_COUNT: tuple[Callable[[Any], KernelBody], ...] = (
    lambda implementation: lambda context: implementation,
    lambda implementation: lambda context, a: implementation,
    lambda implementation: lambda context, a, b: implementation,
    lambda implementation: lambda context, a, b, c: implementation,
    lambda implementation: lambda context, a, b, c, d: implementation,
    lambda implementation: lambda context, a, b, c, d, e: implementation,
    lambda implementation: lambda context, a, b, c, d, e, f: implementation,
    lambda implementation: lambda context, a, b, c, d, e, f, g: implementation,
    lambda implementation: lambda context, a, b, c, d, e, f, g, h: implementation,
    lambda implementation: lambda context, a, b, c, d, e, f, g, h, i: implementation,
)


KERNEL_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
"""The C signature of kernels, for calls from Python; the GIL is released during the call."""


if not TYPE_CHECKING:
    __getattr__ = make_module_getattr(globals(), part="subroutine")
