"""Which axes are cut and what runs where: from a graph to one graph a device, with collectives where shards meet."""
