"""Object code that is placed without LLVM, made here by a C compiler in the code model of kernels."""

from __future__ import annotations

import ctypes
import json
import platform
import subprocess
import sys

import pytest

from hocket.backends.cpu import target_cpu
from hocket.backends.cpu.compilation import object_loader
from hocket.graph.errors import BackendError

from ...given.devices.emulation import needs_compiler

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(
        sys.platform != "linux" or platform.machine() != "x86_64", reason="not x86-64 on Linux: LLVM places its code"
    ),
]
SYMBOL = "wanted"
C_SOURCE = """
long labs(long); long strtol(const char *, char **, int);
static const long powers[] = {1, 10, 100, 1000};
static const char digits[] = "1234";
__attribute__((noinline)) static long apart(long n) { return powers[n & 3]; }
long wanted(long a, long b, long c) { return labs(a) + apart(b) + strtol(digits, 0, 10) + powers[c & 3]; }
"""
LARGE = ("-mcmodel=large", "-fPIC")


def compile_code(text, tmp_path, *options):
    (tmp_path / "code.c").write_text(text)
    file = tmp_path / "code.o"
    command = ["g++", "-x", "c", "-O1", "-c", "-fno-stack-protector", *options, "-o", file, tmp_path / "code.c"]
    subprocess.run(command, check=True)
    return file.read_bytes()


def call_code(code, *arguments):
    function = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_long, ctypes.c_long, ctypes.c_long)
    return function(object_loader.load_function(code, SYMBOL))(*arguments)


@pytest.mark.parametrize("optimised", ["-O0", "-O2"])
def test_code_calls_the_system_and_its_own_parts_and_reads_its_constants(tmp_path, optimised):
    code = compile_code(C_SOURCE, tmp_path, *LARGE, optimised)
    assert object_loader.is_loadable_x86_64_code(code)
    assert call_code(code, -5, 2, 3) == 5 + 100 + 1234 + 1000
    assert call_code(code, 7, 0, 1) == 7 + 1 + 1234 + 10, "of another copy"


def test_code_without_relocations_is_placed(tmp_path):
    assert call_code(compile_code("long wanted(long a, long b, long c) { return a * b + c; }", tmp_path), 6, 7, 8) == 50


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("long n; long wanted(long a, long b, long c) { return n += a; }", r"data that it writes, in \.bss"),
        ("long nobody(long); long wanted(long a, long b, long c) { return nobody(a); }", "calls 'nobody'"),
        ("extern _Thread_local long n; long wanted(long a, long b, long c) { return n; }", "relocation of kind"),
    ],
)
def test_what_kernels_do_not_have_is_refused(text, why, tmp_path):
    with pytest.raises(BackendError, match=why):
        call_code(compile_code(text, tmp_path, *LARGE), 1, 2, 3)


def test_other_code_is_left_to_llvm(tmp_path, monkeypatch):
    code = compile_code(C_SOURCE, tmp_path, *LARGE)
    of_arm = code[:18] + (183).to_bytes(2, "little") + code[20:]
    for other in (b"", code[:40], b"MZ" + code[2:], of_arm):
        assert not object_loader.is_loadable_x86_64_code(other)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not object_loader.is_loadable_x86_64_code(code)


def test_the_processor_that_llvm_reports_is_cached_for_this_one(tmp_path, monkeypatch):
    monkeypatch.setenv("HOCKET_CACHE_DIR", str(tmp_path))
    reported = target_cpu._find_host_cpu.__wrapped__()
    (file,) = (tmp_path / "processors").iterdir()
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    assert target_cpu._find_host_cpu.__wrapped__() == reported, "LLVM was not asked"
    file.write_bytes(file.read_bytes().replace(b"true", b"null"))
    with pytest.raises(ImportError):
        target_cpu._find_host_cpu.__wrapped__()


def test_a_system_that_does_not_tell_of_its_processor_is_asked_each_time(tmp_path, monkeypatch):
    monkeypatch.setenv("HOCKET_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(target_cpu, "_find_host_cpu_cache_file", lambda: None)
    assert target_cpu._find_host_cpu.__wrapped__() == target_cpu._find_host_cpu()
    assert not (tmp_path / "processors").exists()


def test_cached_features_have_the_names_of_llvm(tmp_path, monkeypatch):
    import llvmlite.binding as llvm

    monkeypatch.setenv("HOCKET_CACHE_DIR", str(tmp_path))
    assert target_cpu._find_host_cpu.__wrapped__().features == dict(llvm.get_host_cpu_features())
    (file,) = (tmp_path / "processors").iterdir()
    assert json.loads(file.read_bytes()[32:])["cpu"] == llvm.get_host_cpu_name()
