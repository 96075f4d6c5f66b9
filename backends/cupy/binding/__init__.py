"""Binds instructions to launches: launch words, fusions, iteration axes and packed weights."""
