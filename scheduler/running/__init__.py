"""Plans at work: weights and states on devices, devices that meet, runs."""
