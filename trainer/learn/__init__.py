"""Learning is arithmetic on what was written: rewards become advantages, and advantages a loss."""
