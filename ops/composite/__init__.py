"""Composite ops: functions that build graphs of ops, for convolution, pooling and interpolation."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from ...graph.node import Value
from .convolutions import add_windows as add_windows
from .convolutions import convolution as convolution
from .convolutions import transposed_convolution as transposed_convolution
from .interpolation import interpolate as interpolate
from .pooling import pool as pool

COMPOSITE_OPS: Mapping[str, Callable[..., Value]] = MappingProxyType(
    {function.__name__: function for function in (add_windows, convolution, interpolate, pool, transposed_convolution)}
)
"""The composite ops by name."""
