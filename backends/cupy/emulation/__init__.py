"""CUDA devices emulated on the processor: the same kernel files, compiled by g++."""
