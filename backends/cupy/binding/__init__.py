"""How instructions become launches: words, chains, axes, packed weights."""
