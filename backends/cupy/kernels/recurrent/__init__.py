"""Recurrences, the states that they carry, and what surrounds them."""
