"""Records that all parts of the scheduler share: plans, layouts and pipeline actions."""
