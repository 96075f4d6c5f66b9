"""The GPU time model: predicted launch times from access counters and machine code, without a GPU."""
