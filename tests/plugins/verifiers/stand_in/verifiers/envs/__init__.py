"""Environments, in one module of their own."""
