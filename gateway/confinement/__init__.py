"""Confinement of hostile programs: those of the policy here, and bash for launch scripts in `trainer/shell`."""
