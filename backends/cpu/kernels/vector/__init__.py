"""Building blocks of kernels: vector functions, elementwise rows, cached rows and AMX tiles."""
