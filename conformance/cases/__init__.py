"""Conformance cases: an op on operands with given shapes, layouts and values."""
