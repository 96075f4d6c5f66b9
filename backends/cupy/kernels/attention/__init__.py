"""Attention over cells of every type, by few queries and by many."""
