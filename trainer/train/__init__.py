"""A run that learns: its settings, its loop, its folder, and what is told of it."""
