"""Kernel families: each is a ``.cu`` file, and a module that binds instructions to its launches."""
