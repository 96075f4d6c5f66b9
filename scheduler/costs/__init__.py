"""Speeds of devices and links: guessed, measured on this machine, or from data sheets; and simulated devices."""
