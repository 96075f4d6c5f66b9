"""Measure the limits of this machine: memory bandwidth and arithmetic speed."""
