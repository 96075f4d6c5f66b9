"""The factor search: the factors that shard each node, chosen by the predicted time of a run."""
