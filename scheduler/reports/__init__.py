"""Plan reports in words and in JSON, and the difference between two plans."""
