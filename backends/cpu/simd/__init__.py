"""Vector operations of CPU kernels as functions that emit LLVM IR with llvmlite.

Each function takes an LLVM IR builder `b` and the LLVM values of its operands, and returns the LLVM value of the
result. The functions run while a kernel is compiled. Kernels in ``kernels/`` call the operations by name, without a
builder.

Unless stated otherwise, a vector has 64 bytes: 16 lanes of float32 or int32, or 64 bytes.
"""
