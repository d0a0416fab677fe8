"""TRL's GRPOTrainer: its arguments, and the tools, environments and reward functions that are written for it."""
