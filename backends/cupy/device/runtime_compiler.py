"""A wrapper of compiler libraries that have the calls of NVRTC under other names."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ....graph.errors import BackendError
from .driver import KernelSource


@dataclass(frozen=True, slots=True)
class CompiledCode:
    """The result of a compilation: machine code, mangled kernel names, and the log of the compiler.

    The names may be incomplete: hiprtc of ROCm 5.2 omits names that contain a type alias.
    """

    image: bytes
    mangled_names: Mapping[str, str]
    log: str


@dataclass(frozen=True, slots=True)
class RuntimeCompilerLibrary:
    """A runtime compiler library with the calls of NVRTC: NVRTC itself or hiprtc.

    `name` appears in messages. The C functions of `library` begin with `prefix`; the functions that return machine code
    end with `code_suffix`.
    """

    name: str
    prefix: str
    code_suffix: str
    library: ctypes.CDLL

    def version(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call_library("Version", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def compile(self, source: KernelSource, arch: str, options: Sequence[str]) -> CompiledCode:
        """Compile all requested kernels of a source for an architecture.

        Args:
            source: The source.
            arch: The architecture.
            options: Options of the compiler, without the architecture.

        Raises:
            BackendError: The source does not compile; the message has the first error.
        """
        program = ctypes.c_void_p()
        text, name = source.text.encode(), source.file.encode()
        self._call_library("CreateProgram", ctypes.byref(program), text, name, 0, None, None)
        try:
            for expression in source.names:
                self._call_library("AddNameExpression", program, expression.encode())
            encoded_options = [option.encode() for option in (*options, f"--gpu-architecture={arch}")]
            status = self._find_function("CompileProgram")(
                program, len(encoded_options), (ctypes.c_char_p * len(encoded_options))(*encoded_options)
            )
            log = self._read_output(program, "ProgramLog").rstrip(b"\0").decode()
            if status:
                errors = [line for line in log.splitlines() if "error" in line] or [
                    log.strip() or self._describe_status(status)
                ]
                raise BackendError(f"{source.file} does not compile for {arch}: {errors[0]}")
            found = ((e, self._find_mangled_name(program, e)) for e in source.names)
            lowered = MappingProxyType({e: low for e, low in found if low is not None})
            return CompiledCode(self._read_output(program, self.code_suffix), lowered, log)
        finally:
            self._find_function("DestroyProgram")(ctypes.byref(program))

    def _find_function(self, name: str) -> ctypes._NamedFuncPointer:
        return self.library[self.prefix + name]

    def _call_library(self, name: str, *arguments: object) -> None:
        if status := self._find_function(name)(*arguments):
            raise BackendError(f"{self.name}: {self._describe_status(status)}")

    def _describe_status(self, status: int) -> str:
        words = self._find_function("GetErrorString")
        words.restype = ctypes.c_char_p
        return str(words(status).decode())

    def _read_output(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call_library(f"Get{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call_library(f"Get{what}", program, buffer)
        return buffer.raw

    def _find_mangled_name(self, program: ctypes.c_void_p, expression: str) -> str | None:
        name = ctypes.c_char_p()
        status = self._find_function("GetLoweredName")(program, expression.encode(), ctypes.byref(name))
        return None if status or name.value is None else name.value.decode()
