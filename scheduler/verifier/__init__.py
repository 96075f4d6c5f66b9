"""The proof of a plan, which shares no code with the planner: what each program computes, and that it fits together."""
