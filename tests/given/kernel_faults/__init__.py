"""Bugs as real kernels have them, each planted into the otherwise correct CPU backend."""

from . import activations, layout, memory, moving, products, recurrences, rows

FAULTS = (
    *memory.FAULTS,
    *layout.FAULTS,
    *activations.FAULTS,
    *rows.FAULTS,
    *products.FAULTS,
    *moving.FAULTS,
    *recurrences.FAULTS,
)
