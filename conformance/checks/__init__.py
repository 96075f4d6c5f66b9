"""Whether a result is right: one case run on guarded memory, against the reference and against other runs of itself."""
