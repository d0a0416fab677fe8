"""What a file written for verl 0.7 imports is here under its own name, where no installed verl has it.

offered.py       which names, and which objects of ours stand behind them
importing.py     the import hook that answers to them, of `gateway.standing`
agent.py         what a tool is told of the rollout that calls it
base.py          the two base classes, with the answers that their own methods gave
schemas.py       tool schemas as models with fields
registry.py      interactions and tools of a YAML file
traced.py        the decorator that marked what is traced
reward_score.py  a score by the row's data source
"""
