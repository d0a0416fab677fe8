"""Rewards: calls the reward functions of a run, and sums their weighted scores."""
