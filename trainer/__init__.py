"""RL training on multi-turn rollouts against a gateway, recorded as ledgers of who wrote which token."""
