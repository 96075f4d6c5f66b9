"""Operations of kernels as builders of LLVM code: Python that runs while a kernel is compiled, and never in one.

A function here has a builder `b` before its operands and returns the LLVM value of its result.  Kernels call them by
name, in the Python that Numba compiles: that lies in ``kernels/``, and nothing there sees a builder.
"""
