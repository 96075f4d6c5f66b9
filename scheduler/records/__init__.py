"""Checks of the records of a plan: the types of their fields, and errors that name a wrong field."""
