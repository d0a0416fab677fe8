"""Rollouts: task, ledger builder, the rollout loop, scheduler, admission, steppers and their settings."""
