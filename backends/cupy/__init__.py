"""Kernels in CUDA C++: on CUDA devices through CuPy, and on any processor through an emulation for tests."""
