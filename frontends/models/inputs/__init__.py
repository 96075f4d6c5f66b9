"""The inputs of a step graph: the family of a model, its weights, and the arrays of a step."""
