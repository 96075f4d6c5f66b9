"""The runtime of plans: weights and states on devices, communication between devices, and execution of programs."""
