"""Reports of a run of the kit: summaries, matrices, records, speeds, and expected failures."""
