"""The order of collectives and of pipelined runs."""
