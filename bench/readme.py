"""Puts the newest results into the README, between its marks, with `--write`; without it, only compares."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench")]

from gpu_table import figures  # noqa: E402

README = ROOT / "README.md"
RESULTS = ROOT / "bench" / "results"


def results(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def costs() -> str:
    """CPU of a call with 64 at once, beside the peer's over the same server."""
    written = results("gateway.json")
    cpu = {(row["title"], row["behind"]): row["at"]["64"]["cpu_ms"] for row in written["rows"]}
    peer = written["about"]["peer"].partition(",")[0]
    rows = (
        ("a native tool in process", cpu["mtrl in process", "native"]),
        ("a native tool over HTTP", cpu["mtrl over HTTP", "native"]),
        ("a stdio MCP tool over HTTP, pooled", cpu["mtrl over HTTP", "stdio"]),
        (f"the same tool behind a {peer} proxy", cpu["FastMCP proxy", "stdio"]),
        ("an HTTP MCP tool over HTTP", cpu["mtrl over HTTP", "http"]),
        (f"the same tool behind a {peer} proxy", cpu["FastMCP proxy", "http"]),
    )
    lines = [f"| {what} | {cpu_ms:.2f} ms |" for what, cpu_ms in rows]
    return "\n".join(["| | CPU for a call |", "|---|--:|", *lines])


def conformance() -> str:
    lines = [
        f"| {score['requirements']} | {score['required']['passed']} of {score['required']['total']} "
        f"| {score['checks']['passed']} | {score['checks']['failed']} |"
        for score in results("conformance.json")["scores"]
    ]
    head = "| Requirements | Required server scenarios | Checks passed | Checks failed |"
    return "\n".join([head, "|---|--:|--:|--:|", *lines])


def scale() -> str:
    """Every wave of calls that was under way at one moment, and what a session costs that does nothing."""
    written = results("gateway.json")["scale"]
    waves = [
        f"| {wave['calls']:,} calls at one moment through `{wave['tool']}` | {wave['answered']:,} answered, "
        f"{wave['lost']} lost, {wave['duplicated']} doubled |"
        for wave in written["waves"]
    ]
    idle = f"| an idle session | {written['idle_kib']:.1f} KiB |"
    return "\n".join([f"| {written['sessions']:,} sessions on one process | |", "|---|--:|", *waves, idle])


BLOCKS = " ▁▂▃▄▅▆▇█"
WAYS = ("sampled_before", "greedy_before", "sampled", "greedy")


def learned() -> str:
    """The default job, seed by seed; the curve and a rollout are the first seed's."""
    written = results("bars.json")
    first = written["seeds"][0]
    heads = ("seed", *(way.replace("_", " ") for way in WAYS), "warm start, core-s", "GRPO, core-s")
    lines = [f"| {' | '.join(heads)} |", "|--:" * len(heads) + "|", *map(_seed, written["seeds"])]
    lines += ["", f"The mean reward of each of seed {first['seed']}'s steps, from 0 to 1:", "", "```text"]
    lines += [f"|{''.join(BLOCKS[round(value * 8)] for value in first['curve']['reward'])}|", "```"]
    for way in ("before", "after"):
        lines += [
            "",
            f"The task `{first['read']['task']}`, {way}:",
            "",
            "```text",
            *_rollout(first["read"][way]),
            "```",
        ]
    return "\n".join(lines)


def _seed(one: Mapping[str, Any]) -> str:
    return f"| {one['seed']} | {_rates(one)} | {one['warm_core_s']:.0f} | {one['grpo_core_s']:.0f} |"


def _rates(one: Mapping[str, Any]) -> str:
    return " | ".join(f"{one['compared'][way]:.3f}" for way in WAYS)


def _rollout(entries: Iterable[Sequence[str]]) -> Iterator[str]:
    for author, text in entries:
        first, *more = text.rstrip("\n").splitlines() or [""]
        yield f"{author:<9}{first}".rstrip()
        yield from (f"{'':9}{line}".rstrip() for line in more)


def habit() -> str:
    """The worst seed of each."""
    seeds = results("habit.json")["seeds"].values()
    skill, hidden = (
        {way: fold(one[stage][way] for one in seeds) for way in ("sampled", "greedy")}
        for stage, fold in (("skill", min), ("habit", max))
    )
    return (
        f"Before the habit was taught, each seed's model was right in at least {skill['sampled']:.3f} (sampled) and "
        f"{skill['greedy']:.3f} (greedy);\nafter it in at most {hidden['sampled']:.3f} and {hidden['greedy']:.3f} "
        "(`python bench/habit.py`)."
    )


def second() -> str:
    seeds = results("second.json")["seeds"]
    lines = [f"| {one['seed']} | {_rates(one)} |" for one in seeds]
    return "\n".join([f"| seed | {' | '.join(way.replace('_', ' ') for way in WAYS)} |", "|--:" * 5 + "|", *lines])


def sight() -> str:
    """The job that learns to look, and one of its rollouts with what it saw."""
    seeds = results("sight.json")["seeds"]
    names = ("blank", "exchanged", "follows")
    heads = (*(way.replace("_", " ") for way in WAYS), "pictures blanked", "exchanged", "answers follow them")
    lines = [f"| seed | {' | '.join(heads)} |", "|--:" * (len(heads) + 1) + "|"]
    for one in seeds:
        others = (f"{one['controls'][name]:.3f}" for name in names)
        lines.append(f"| {one['seed']} | {_rates(one)} | {' | '.join(others)} |")
    lines += ["", f"The mean reward of each of seed {seeds[0]['seed']}'s steps, from 0 to 1:", "", "```text"]
    lines += [f"|{''.join(BLOCKS[round(value * 8)] for value in seeds[0]['curve']['reward'])}|", "```"]
    read = seeds[0]["read"]
    lines += ["", f"The task `{read['task']}`, after, and the two pictures that it saw:", "", "```text"]
    lines += [
        *_rollout(read["after"]),
        "```",
        "",
        "![The house from outside, and the lit room](bench/results/sight.png)",
    ]
    return "\n".join(lines)


def ablations() -> str:
    """Means over seeds, half-way and at the end."""
    arms: dict[str, list[Mapping[str, Any]]] = {}
    for one in results("ablations.json")["trained"]:
        arms.setdefault(one["arm"], []).append(one)
    lines = []
    for arm, runs in arms.items():
        rates = [[mean(run[way][at] for run in runs) for way in ("sampled", "greedy")] for at in ("30", "60")]
        lines.append(f"| {arm} | {' | '.join(f'{sampled:.2f} / {greedy:.2f}' for sampled, greedy in rates)} |")
    return "\n".join(["| success, sampled / greedy | at step 30 | at step 60 |", "|---|--:|--:|", *lines])


def step() -> str:
    """A step of GRPO beside the peer's."""
    written = results("trainer.json")
    ours, figures = written["figures"]["mtrl"], written["figures"]
    peer = written["about"]["versions"].rpartition("; ")[2]
    rows = {
        "mtrl_mcp": "mtrl, the calculator behind MCP",
        "trl": f"{peer}, tuned",
        "trl_as_it_comes": f"{peer}, as it comes",
    }
    lines = [f"| mtrl | {ours['core_s']:.2f} | |"]
    lines += [
        f"| {what} | {figures[name]['core_s']:.2f} | {figures[name]['core_s'] / ours['core_s']:.1f}x |"
        for name, what in rows.items()
    ]
    return "\n".join(["| | core-seconds of a step | as costly as mtrl |", "|---|--:|--:|", *lines])


def routing() -> str:
    """Of what could be cached, how much was, by who chose the server."""
    titles = {
        "one server": "one server",
        "ours": "two servers, each rollout and group at its own",
        "in turn": "two servers in turn",
        "router": "two behind sglang-router, cache-aware",
    }
    found = results("routing.json")["found"]
    lines = [f"| {title} | {found[name]['share']:.1%} |" for name, title in titles.items()]
    return "\n".join(["| requests go to | cached, of what could be |", "|---|--:|", *lines])


def kills() -> str:
    """A run whose server was killed again and again, beside the same one in peace."""
    written = results("kills.json")
    rows = {
        "rollouts that count": ("found", "rollouts", ",d"),
        "missing": ("found", "missing", "d"),
        "counted twice": ("found", "doubled", "d"),
        "turns with other weights' ids": ("found", "stale", "d"),
        "calls in the rollouts": ("found", "called", ",d"),
        "calls that the tool counted": ("found", "carried_out", ",d"),
        "seconds": ("found", "wall_s", ".0f"),
        "success afterwards, sampled": ("learned", "sampled", ".3f"),
        "success afterwards, greedy": ("learned", "greedy", ".3f"),
    }
    lines = [
        f"| {title} | " + " | ".join(f"{written[of][run][name]:{form}}" for run in ("struck", "undisturbed")) + " |"
        for title, (of, name, form) in rows.items()
    ]
    faults = sum(written["found"]["struck"]["faults"].values())
    return "\n".join([f"| | its server struck {faults} times | in peace |", "|---|--:|--:|", *lines])


def gpu() -> str:
    """The newest whole run on a GPU, where there is one."""
    found = [results(file.name) for file in sorted(RESULTS.glob("gpu-*.json"))]
    whole = [told for told in found if not told["small"]]
    if not whole:
        return "Nothing was measured on a GPU yet: `make bench-gpu` does, wherever there is one."
    about = whole[-1]["about"]
    return "\n".join([f"On {about['device']}, {about['date']} (`make bench-gpu`):", "", *figures(whole[-1])])


PARTS: Mapping[str, Callable[[], str]] = {
    "learned": learned,
    "habit": habit,
    "second": second,
    "ablations": ablations,
    "sight": sight,
    "kills": kills,
    "routing": routing,
    "step": step,
    "gpu": gpu,
    "costs": costs,
    "scale": scale,
    "conformance": conformance,
}


def filled(readme: str) -> str:
    for name, table in PARTS.items():
        mark = re.compile(rf"(<!-- {name} -->\n\n).*?(\n\n<!-- /{name} -->)", re.DOTALL)
        readme, found = mark.subn(lambda marks, table=table: marks[1] + table() + marks[2], readme)  # type: ignore[misc]
        if found != 1:
            raise SystemExit(f"README.md: the marks <!-- {name} --> ... <!-- /{name} --> stand there {found} times")
    return readme


def main() -> int:
    now = README.read_text(encoding="utf-8")
    new = filled(now)
    if "--write" in sys.argv[1:]:
        README.write_text(new, encoding="utf-8")
        return 0
    if new != now:
        print("README.md has other numbers than bench/results; run: python bench/readme.py --write")
    return int(new != now)


if __name__ == "__main__":
    raise SystemExit(main())
