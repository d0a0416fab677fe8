"""What was written for ms-swift 3 and 4: its plug-in files, and its command-line flags as run files.

`compat_names.py` says which names users' files can import; `schedulers.py` and `orm.py` are the
classes behind them, and `stepper.py` makes a stepper of a scheduler. `keys.yaml` has all flags,
`conversions.py` converts their values, and `read_script.py` reads them. It needs the plug-in `scripts`.
"""
