"""The dataflow of programs, and the instructions that one kernel may compute together."""
