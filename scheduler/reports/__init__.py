"""Reports about plans as text and JSON, and the difference between two plans."""
