"""Slots that share one pool of blocks, and the prefix cache and the admission of requests over it."""
