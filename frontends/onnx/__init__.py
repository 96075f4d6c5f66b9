"""Import ONNX models as graphs: an op table, the import, the checks of files, and calls with arrays.

The meaning of an op is the ONNX operator specification of its opset (https://onnx.ai/onnx/operators/).
"""
