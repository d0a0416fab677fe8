"""Files written for ms-swift's multi-turn GRPO run as they are: their schedulers, environments, rewards and flags."""
