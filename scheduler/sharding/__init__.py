"""The SPMD partitioner: choose the axes to shard and the device of each node, and emit one graph for each device."""
