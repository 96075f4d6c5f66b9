"""The graph value, the entries and the partial sum that each value of a device equals."""
