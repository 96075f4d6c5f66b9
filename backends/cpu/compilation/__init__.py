"""Compile kernels to machine code: the compiler, the arguments of kernels, and the loader of object code."""
