"""A real model of 135 million parameters that learns to use tools on a CPU: `make real`."""
