"""The state that rollouts begin from, and the hash by which the states that they end with are compared."""

MAX_NAME = 200
"""Characters of a state's name."""
