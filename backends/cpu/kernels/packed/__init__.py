"""The packed formats of quantised weights: how each type is packed, and how kernels read it."""
