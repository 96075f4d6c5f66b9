"""Access to CUDA devices: memory, launches, compiled code and transfers."""
