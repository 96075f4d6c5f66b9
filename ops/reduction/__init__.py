"""Ops that reduce, normalise or sort along an axis."""
