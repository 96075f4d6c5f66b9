"""PyTorch programs as graphs: a table of ATen ops, exported programs, their files, and a backend of `torch.compile`.

PyTorch is imported when a program is, and by nothing else.
"""
