"""Environments of other frameworks, each in a process of its own whose Python has that framework."""
