"""What tests of the emulated CUDA devices need of the machine."""

import shutil

import pytest

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation needs g++")
