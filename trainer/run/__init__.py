"""What a run leaves behind: rollouts that are over, and the files that hold them."""
