"""The kernels that Numba compiles, one file a family, and how instructions are bound to them."""
