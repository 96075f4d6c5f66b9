"""ONNX files as graphs: a table of ONNX ops, models, their files, and how they are called with arrays.

What an op is follows the ONNX operator specification of its opset (https://onnx.ai/onnx/operators/).
"""
