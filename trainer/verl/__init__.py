"""What was configured for verl 0.7 becomes a run file of ours, or is refused by name: nothing is left out silently.

written.py    a YAML file or a command line -> keys, each with its value and its place
shell.py      the words of `python3 -m verl.trainer.main_ppo ...` out of a script
resolve.py    `${...}` in values
row.py        a key of theirs, what it becomes, and why
table.py      all of them: what is translated by, and what the guide prints
idle.py       those that have nothing to say here
loss.py rollout.py model.py   what takes more than one key to say
translate.py  keys -> settings, and what became of each key
told.py       that as a report, and as a run file
reward.py     their reward functions, asked as they expect it
"""
