"""The candidates of a plan request, their estimated times, and the choice of the best one."""
