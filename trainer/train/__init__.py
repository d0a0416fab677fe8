"""Training runs: settings, the training loop, checkpoints, evaluation, alarms, and the run folder."""
