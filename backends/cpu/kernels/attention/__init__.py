"""Attention kernels for decode, and for prefill by vectors or by AMX tiles."""
