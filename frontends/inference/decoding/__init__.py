"""Decode steps in which the device chooses tokens, or selects candidates, and steps that are launched ahead."""
