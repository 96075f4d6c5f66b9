"""Shared parts of all backends in host memory: buffers, bindings, collectives and progress."""
