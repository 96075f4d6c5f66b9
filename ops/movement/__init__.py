"""Ops that move, select or reshape entries."""
