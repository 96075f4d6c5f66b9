"""The layers that decoders are built of, a kind a module: mixers, feed-forwards, residuals."""
