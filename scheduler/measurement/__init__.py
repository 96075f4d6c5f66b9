"""Measurements of running plans: speeds of devices, statistics of values, and differences between two devices."""
