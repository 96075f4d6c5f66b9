"""The ways to answer a request for a plan, what speaks for each, and which is taken."""
