"""Files of a run: rollouts, their media, metrics, token credit and run.json."""
