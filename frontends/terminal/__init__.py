"""Shared parts of the commands: arguments, output, chat, and runs of several processes."""
