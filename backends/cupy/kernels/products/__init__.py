"""Matmuls with weights of every dtype, for few and many tokens, also with weights of experts."""
