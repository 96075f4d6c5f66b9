"""Matrix products, attention, and ops of their models."""
