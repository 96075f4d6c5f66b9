"""Bind programs to compiled steps, cache the bindings on disk, and replay them on a pool of threads."""
