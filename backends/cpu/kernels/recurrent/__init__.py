"""Kernels that process tokens one after another: gated delta nets, scans, short convolutions and windows."""
