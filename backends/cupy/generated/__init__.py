"""CUDA text that is generated from expressions of the scalar language."""
