"""The layers of decoders, one kind per module: mixers, feed-forward networks, residual streams."""
