"""Demos: generated tasks, and tiny models that are built and warm-started for them in a minute on a CPU."""
