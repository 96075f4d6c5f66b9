"""Ops that compute each entry of the result from entries at the same index."""
