"""What was written for verl 0.7: its names for users' files, and its configurations as run files.

`base.py`, `schemas.py`, `registry.py` and `*_rule.py` are the classes and scores that users' files import, and
`compat_names.py` says which name is which. `keys.yaml` has all keys of its configurations, `conversions.py` converts
their values, and `reward_function.py` calls verl's reward functions. It needs the plug-in `scripts`.
"""
