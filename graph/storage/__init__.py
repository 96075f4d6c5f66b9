"""Atomic writes of files, and the disk cache."""
