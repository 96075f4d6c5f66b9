"""Tensor functions with the semantics of PyTorch and ONNX, built from the ops of hocket.

Both operands of a binary function broadcast. Axes may be negative, dtypes may be integers or booleans, and a tensor
may have any rank. The op tables of `frontends.torch` and `frontends.onnx` use these functions.
"""
