"""Attention: of few tokens, of many by vectors, and of many by tiles."""
