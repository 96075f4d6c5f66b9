"""The content of every byte while a program runs, and the rollback of a failed run."""
