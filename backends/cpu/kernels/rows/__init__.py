"""Kernels over rows: norms, reductions, rotary embedding, and rows that are gathered or scattered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .....graph.old_names import make_package_getattr

if not TYPE_CHECKING:
    __getattr__ = make_package_getattr(
        __name__,
        **dict.fromkeys(
            ("ELEMENT_STRIDE_WORDS", "load_lanes", "make_row_args", "make_row_walk", "store_lanes"),
            "hocket.backends.cpu.kernels.vector.elementwise",
        ),
    )
