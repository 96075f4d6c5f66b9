"""Attention over KV caches of every dtype, for few and for many query rows."""
