"""Step tables: the steps of a program, the work of each thread, and the barriers of the threads."""
