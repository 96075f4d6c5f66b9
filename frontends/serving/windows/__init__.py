"""Sessions over windows of neighbouring slots, in which the steps of an engine run."""
