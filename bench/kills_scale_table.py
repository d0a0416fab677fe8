"""The table of `bench/kills_scale.py`: both runs beside each other, and whether the promise is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

ROWS = {
    "steps": "steps",
    "rollouts": "rollouts that are trained",
    "missing": "rollouts lost",
    "doubled": "rollouts counted twice",
    "made_anew": "rollouts that a kill ended, and that were played again",
    "calls": "tool calls of trained rollouts",
    "executed_twice": "of these, calls that were carried out twice",
    "executed": "all calls that were carried out, those of ended rollouts and repeated steps too",
    "wall_s": "seconds",
}


def format_results(content: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    found = content["found"]
    kinds = Counter(kind for kind, _ in found["killed"]["kills"])
    lines = [f"{name}: {value}  " for name, value in content["about"].items()]
    lines += ["killed with -9: " + ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items())) + "  "]
    lines += [f"after steps: {', '.join(str(step) for _, step in found['killed']['kills'])}  ", ""]
    lines += [f"| | killed {sum(kinds.values())} times | undisturbed |", "|---|--:|--:|"]
    lines += [
        f"| {title} | {found['killed'][key]:,.0f} | {found['undisturbed'][key]:,.0f} |" for key, title in ROWS.items()
    ]
    lines += [
        "",
        "Starts of each process. An agent starts its rank itself; a worker that ended with the run is started again.",
        "",
        *format_starts(found),
    ]
    lines += ["", "| promise | |", "|---|---|"]
    met = "met" if content["kept"] else "**missed**"
    lines += [f"| nothing lost, counted twice or carried out twice; losses of all steps equal | {met} |"]
    lines += [f"| largest difference of loss, gradient norm and reward | {content['apart']:.2g} |"]
    lines += [
        f"| steps with a loss, of {content['steps']}; the others have no gradient in either run | {content['losses']} |"
    ]
    return "\n".join(["# A job on two machines whose processes are killed", "", *lines]) + "\n"


def format_starts(found: Mapping[str, Any]) -> list[str]:
    """How often each process was killed and started."""
    kinds = Counter(kind for kind, _ in found["killed"]["kills"])
    lines = ["| process | killed | started | undisturbed |", "|---|--:|--:|--:|"]
    for name, starts in sorted(found["killed"]["starts"].items()):
        lines.append(f"| {name} | {kinds[name]} | {starts} | {found['undisturbed']['starts'][name]} |")
    return lines
