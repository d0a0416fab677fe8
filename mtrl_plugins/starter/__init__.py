"""`mtrl-train init`: writes a job to start from, with tool, server, reward, interaction, tasks and tests.

`--from` needs the plug-ins `scripts` and `verl`, `swift` or `trl`. `job/` has its files; `write_job.py` writes them, and `commented_settings.py` the run file with a comment on each line.
"""
