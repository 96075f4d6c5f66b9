"""Slots whose KV caches share one pool of blocks, and the prefix cache, admission and preemption over it."""
