"""An opponent in a function of a file."""


def bold(observation: str) -> str:
    return f"[{int(observation.rpartition('say [')[2].split(']')[0]) + 1}]" if "say [" in observation else "[7]"
