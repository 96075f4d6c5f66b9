"""A backend that runs the float64 references of the ops."""
