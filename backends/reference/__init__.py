"""The float64 references of the ops as a backend."""
