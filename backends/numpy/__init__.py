"""The exact NumPy backend: every kernel a few ufuncs over arrays that are bound once."""
