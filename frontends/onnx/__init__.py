"""Import of ONNX models as graphs: op table, importer, checks of files, and calls with arrays.

The meaning of an op is the ONNX operator specification of its opset (https://onnx.ai/onnx/operators/).
"""
