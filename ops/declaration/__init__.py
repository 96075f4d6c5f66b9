"""What an op is declared with: its record, signature, attributes, samples, the table of all and the oracle."""
