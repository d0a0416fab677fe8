"""What a rollout is worth: functions, the weights that join them, and the deadlines that they keep."""
