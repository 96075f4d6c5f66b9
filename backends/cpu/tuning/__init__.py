"""Measure this machine: memory bandwidth, arithmetic speed, and the best prefetch distances."""
