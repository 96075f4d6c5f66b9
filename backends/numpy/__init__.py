"""The exact NumPy backend: each kernel is a few ufuncs over arrays that are bound once."""
