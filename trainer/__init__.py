"""Multi-turn rollouts against a gateway, kept as ledgers of who wrote which token."""
