"""Plans and programs as plain data and JSON, and back."""
