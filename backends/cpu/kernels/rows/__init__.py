"""Kernels over rows: norms, reductions, rotary embedding, and rows that are gathered or scattered."""
