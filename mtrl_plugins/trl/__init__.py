"""TRL's GRPOTrainer: its arguments, and the tools, environments and reward functions that are written for it.

`api.py` has the trainer with TRL's interface, `keys.yaml` all arguments, and `read_trl_file.py` reads a script.
It needs the plug-ins `scripts` and `environments`.
"""
