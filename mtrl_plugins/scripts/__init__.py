"""Training scripts for verl and ms-swift, read with a confined bash: `translate`, `--verl-config` and `--swift`.

`script_reader.py` is the entry point, `confine.py` confines bash, `stubs.py` stands in for programs, and `launches.py`
reads what the stubs recorded.
"""
