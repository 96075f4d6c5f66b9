"""Operations of kernels as builders of LLVM code: Python that runs while a kernel is compiled, and never in one."""
