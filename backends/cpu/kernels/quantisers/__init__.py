"""Quantisers of weights: float32 rows to the block types of files, with a search of scales by weighted errors."""
