"""Recurrences over tokens with a state."""
