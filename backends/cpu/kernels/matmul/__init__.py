"""Matrix products with packed, float and MoE weights."""
