"""Plans a run on devices that need not be there: memory per rank, and a simulation of rollouts and updates.

`plan_run.py` is the entry point of `mtrl-train plan`; `simulate.py` plays a step of the run with `speeds.py`, which
`calibrate.py` takes from data sheets.
"""
