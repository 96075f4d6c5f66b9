"""CPU kernels in Python that Numba compiles, one file per family, each with the functions that bind its instructions.

Functions marked ``@kernel`` or ``@subroutine``, or passed to `Kernel` or `subroutine`, run as machine code on
addresses. They call subroutines and the operations of ``simd/``. All other code is plain Python that runs once, when a
program is bound.
"""
