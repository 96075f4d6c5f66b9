"""How long launches would take on GPUs that are not here: from counted accesses and machine code."""
