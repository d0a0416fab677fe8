"""Where v0 has MultiTurnEnv."""
