"""Runs plug-in files written for ms-swift's multi-turn GRPO: schedulers, gym environments and reward functions."""
