"""Running of plans: weights and states on devices, communication between devices, and the execution of programs."""
