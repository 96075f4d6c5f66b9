"""Tensors as PyTorch and ONNX mean them, said with hocket's ops: broadcasting both ways, axes from either end,
integers and truth values, any rank.

The tables of `frontends.torch` and `frontends.onnx` are written with these functions.
"""
