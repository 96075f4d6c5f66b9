"""What is tried: ops on operands of some shapes, laid out and filled in some way."""
