"""The compiled CPU backend: kernels by Numba and LLVM, replayed without the GIL."""
