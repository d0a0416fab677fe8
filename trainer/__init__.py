"""RL training on multi-turn rollouts against a gateway, recorded as ledgers of who wrote which token."""

from gateway import old_names as old_names
