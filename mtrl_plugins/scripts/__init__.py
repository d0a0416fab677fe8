"""Training scripts for verl and ms-swift, read with a confined bash: `translate`, `--verl-config` and `--swift`.

`script_reader.py` reads scripts: `confine.py` confines bash, `stubs.py` stands in for programs, and `launches.py` reads
what the stubs recorded. `key_table.py` and `translate.py` turn the keys of verl, ms-swift and TRL, whose tables and
conversions are in the plug-ins `verl`, `swift` and `trl`, into run files.
"""
