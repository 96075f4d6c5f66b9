"""What a run of the kit says: summaries, matrices, records, speeds, and failures that are known."""
