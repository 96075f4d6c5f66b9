"""Sessions: states of sequences, buckets, micro-batches, prefill chunks, checkpoints and saved states."""
