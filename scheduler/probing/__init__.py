"""What running plans shows: speeds of devices, what values hold, and where two devices differ."""
