"""Composite ops: functions that build graphs of ops, for convolution, pooling and interpolation."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from ...graph.node import Value
from .convolutions import add_windows, convolution, transposed_convolution
from .interpolation import interpolate
from .pooling import pool

COMPOSITE_OPS: Mapping[str, Callable[..., Value]] = MappingProxyType(
    {function.__name__: function for function in (add_windows, convolution, interpolate, pool, transposed_convolution)}
)
"""The composite ops by name."""
