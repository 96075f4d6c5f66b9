"""Families of kernels: each a ``.cu`` file, and a module that binds instructions to launches of it."""
