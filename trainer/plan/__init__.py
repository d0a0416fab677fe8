"""Plans a run on devices that need not be there: memory per rank, and a simulation of rollouts and updates."""
