"""Products of matrices with weights of all types: packed, float, and chosen by routing."""
