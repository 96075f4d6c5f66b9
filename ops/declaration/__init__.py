"""The declaration of an op: its record, signature, attributes, axis links and sample cases."""
