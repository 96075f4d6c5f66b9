"""Tensor functions with the semantics of PyTorch and ONNX, built from the ops of hocket.

They have mutual broadcasting, negative axes, integers, booleans and any rank. The op tables of `frontends.torch` and
`frontends.onnx` use them.
"""
