"""Operations of kernels, as builders of LLVM code: this Python runs while a kernel is compiled, never inside a kernel.

A function here takes a builder `b` before its operands and returns the LLVM value of its result. Kernels call the
operations by name, in the Python that Numba compiles. That Python is in ``kernels/``, where no builder appears.
"""
