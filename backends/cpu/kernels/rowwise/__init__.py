"""Kernels that compute each row by itself: activations with parameters, repeats, casts, and mixing of streams."""
