"""Rolls dice: a tool, tasks that need it, and a command."""
