"""Matrix products with weights of every type, by few tokens and by many, also with chosen experts."""
