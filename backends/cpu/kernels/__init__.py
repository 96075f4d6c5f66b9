"""Kernels in the Python that Numba compiles, one file a family, each with what binds its instructions to them.

What is marked ``@kernel`` or ``@part``, or made by `Kernel` and `part`, runs as machine code on addresses; it calls
parts and the operations of ``simd/``.  All else is plain Python that runs once, when a program is bound.
"""
