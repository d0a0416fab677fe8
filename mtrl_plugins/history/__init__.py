"""Rollouts that are longer than a context: a history that is shortened by a summary or a window; sub-agents."""
