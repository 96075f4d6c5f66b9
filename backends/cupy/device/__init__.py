"""What a CUDA device is asked for: memory, launches, compiled code, transfers."""
