"""Devices without memory on a virtual clock."""
