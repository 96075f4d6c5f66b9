"""Pipelined runs: the time of each stage, and the order of runs."""
