"""The state that rollouts begin from, and the hash by which the states that they end with are compared."""
