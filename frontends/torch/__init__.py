"""Import of PyTorch programs as graphs, and a backend of `torch.compile`.

An op table converts ATen calls to nodes. Programs come from `torch.export`, from saved files, or from Dynamo. PyTorch
is imported only when a program is imported.
"""
