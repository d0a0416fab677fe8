"""Three ways for weights to reach servers; which one is a question of where the servers are."""
