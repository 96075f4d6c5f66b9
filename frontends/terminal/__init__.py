"""What the commands have in common: how they read arguments, what they print, and how they run in several processes."""
