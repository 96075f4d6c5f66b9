"""Drafts in batches: a drafter proposes the next tokens of several slots, and one run of the model evaluates them."""
