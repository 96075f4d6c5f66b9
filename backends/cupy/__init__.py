"""Backends with CUDA C++ kernels: on CUDA devices through CuPy, and on any processor through an emulator for tests."""
