"""Writes tables of bench/results into docs/results.md and README.md, between marks; without `--write` only compares."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from shutil import copyfile
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench")]

from arms_table import CEILING, group_by_arm, steps_to  # noqa: E402
from gpu_table import format_figures  # noqa: E402
from rollout_text import fence_rollout  # noqa: E402
from rows import ROWS  # noqa: E402
from soak import format_growths  # noqa: E402

README = ROOT / "README.md"
PAGE = ROOT / "docs" / "results.md"
IMAGE = ROOT / "docs" / "images" / "sight.png"
"""A copy of the image in bench/results: pages of the documentation can only show images of their folder."""
RESULTS = ROOT / "bench" / "results"


ENDS = 3
"""Steps of a run's begin and end, whose rewards are averaged."""


def results(name: str) -> Any:
    """A file of bench/results."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


FLOORS = {
    "native": ("a native tool over REST", "a bare Starlette endpoint with the same JSON"),
    "stdio": ("a stdio MCP tool over REST", "the raw `mcp` client alone"),
    "http": ("an HTTP MCP tool over REST", "the raw `mcp` client alone"),
    "session": ("a session opened and closed", "a call of a native tool"),
    "front-native": ("a native tool over MCP", "a bare `mcp` server"),
    "front-stdio": ("a stdio MCP tool over MCP", "a bare `mcp` server and the raw client"),
    "front-http": ("an HTTP MCP tool over MCP", "a bare `mcp` server and the raw client"),
}
"""Rows of the gateway's benchmark: what they are, and their floors."""


def costs() -> str:
    """CPU per call with 64 at once, as multiples of the floors; and FastMCP's, as multiples of ours."""
    record = results("gateway.json")
    measured = {row["key"]: row for row in record["rows"]}
    peer = record["about"]["peer"].partition(",")[0]
    lines = []
    for row in (row for row in ROWS if row.key in FLOORS):
        what, floor = FLOORS[row.key]
        times, peer_times = (_times(measured[row.key][ratio]) for ratio in ("of_floor", "peer_over"))
        cost = f"{times:.2f}x of {floor}"
        if row.at_most is not None and times is not None and times > row.at_most:
            cost += f" (missed: at most {row.at_most:g}x)"
        beside = "" if peer_times is None else f"{peer_times:.2f}x"
        if row.beats_peer is not None and peer_times is not None and peer_times < row.beats_peer:
            beside += f" (missed: {row.beats_peer:g}x)"
        lines.append(f"| {what} | {cost} | {beside} |")
    return "\n".join([f"| | CPU for a call | {peer}, tuned, costs |", "|---|---|--:|", *lines])


def _times(ratios: Mapping[str, Mapping[str, float]]) -> float | None:
    return ratios["64"]["median"] if "64" in ratios else None


def conformance() -> str:
    """Scores of the MCP conformance suite."""
    lines = [
        f"| {score['half']} | {score['requirements']} | {score['required']['passed']} of {score['required']['total']} "
        f"| {score['checks']['passed']} | {score['checks']['failed']} |"
        for score in results("conformance.json")["scores"]
    ]
    head = "| The gateway as | Requirements | Required scenarios | Checks passed | Checks failed |"
    return "\n".join([head, "|---|---|--:|--:|--:|", *lines])


def conformance_in_short() -> str:
    """The required scenarios of both halves, in one sentence."""
    halves: dict[str, list[str]] = {}
    for score in results("conformance.json")["scores"]:
        passed = f"{score['required']['passed']} of {score['required']['total']} ({score['requirements']})"
        halves.setdefault(score["half"], []).append(passed)
    scores = "; ".join(f"as a {half}, {' and '.join(passed)}" for half, passed in halves.items())
    return f"Required scenarios of the official MCP conformance suite (`make conformance`): {scores}."


def scale() -> str:
    """Waves of concurrent calls, and the memory of an idle session."""
    record = results("gateway.json")["scale"]
    waves = [
        f"| {wave['calls']:,} calls at one moment through `{wave['tool']}` | {wave['answered']:,} answered, "
        f"{wave['lost']} lost, {wave['duplicated']} doubled |"
        for wave in record["waves"]
    ]
    idle = f"| an idle session | {record['idle_kib']:.1f} KiB |"
    return "\n".join([f"| {record['sessions']:,} sessions on one process | |", "|---|--:|", *waves, idle])


WAYS = ("sampled_before", "greedy_before", "sampled", "greedy")


def learned() -> str:
    """The default job, seed by seed."""
    return "\n".join(_success(results("bars.json")["seeds"]))


def learned_in_short() -> str:
    """The table of `learned`, and a rollout of the first seed."""
    record = results("bars.json")
    read = record["seeds"][0]["read"]
    lines = ["", "After training, on a held-out task:", "", *fence_rollout(read["after"])]
    return "\n".join([*_success(record["seeds"]), *lines])


def _success(seeds: Sequence[Mapping[str, Any]]) -> list[str]:
    heads = (
        "seed",
        "steps",
        *(way.replace("_", " ") for way in WAYS),
        "warm start, core-s",
        "GRPO, core-s",
        "core's slowness",
    )
    return [f"| {' | '.join(heads)} |", "|--:" * len(heads) + "|", *map(_seed, seeds)]


def _seed(item: Mapping[str, Any]) -> str:
    steps = len(item["curve"]["reward"])
    costs = f"{item['warm_core_s']:.0f} | {item['grpo_core_s']:.0f} | {item['slowness']:.1f}x"
    return f"| {item['seed']} | {steps} | {_rates(item)} | {costs} |"


def _rates(item: Mapping[str, Any]) -> str:
    return " | ".join(f"{item['compared'][way]:.3f}" for way in WAYS)


def first_run() -> str:
    """What the first commands cost on a machine with nothing."""
    rows = {row["command"]: row["cpu_s"] for row in results("first_run.json")["rows"]}
    return (
        f"On a bare Debian, `make install` takes {rows['make install']} s of CPU, and `make train` "
        f"{rows['make train']} s more{results('first_run.json')['about'].get('note', '')} "
        "(`python bench/first_run.py --debian`)."
    )


STAGES = {
    "before": "the model",
    "before_with_examples": "with four examples",
    "start": "SFT on own successes",
    "after": "GRPO",
}


def real() -> str:
    """The real model, seed by seed: greedy and sampled success, and what it took in all."""
    heads = ["seed", *STAGES.values(), "core-minutes"]
    lines = [f"| {' | '.join(heads)} |", "|--:" * len(heads) + "|"]
    for item in results("real.json")["seeds"]:
        parts = item["parts"]
        rates = (
            " / ".join(f"{parts[f'{stage}/{way}']['value']:.3f}" for way in ("greedy", "sampled")) for stage in STAGES
        )
        core_s = sum(cost["core_s"] for cost in (*parts.values(), *item["seconds"].values()))
        lines.append(f"| {item['seed']} | {' | '.join(rates)} | {core_s / 60:.0f} |")
    return "\n".join(lines)


def real_in_full() -> str:
    """The table of `real`, kinds of problems, and where the time went."""
    record = results("real.json")
    first = record["seeds"][0]
    kinds = list(first["parts"]["after/greedy"]["kinds"])
    lines = [real(), "", f"| seed {first['seed']}, greedy | {' | '.join(kinds)} |", "|---|" + "--:|" * len(kinds)]
    for stage, title in STAGES.items():
        found = first["parts"][f"{stage}/greedy"]["kinds"]
        rates = (f"{found[kind]['value']:.2f}" for kind in kinds)
        lines.append(f"| {title} | {' | '.join(rates)} |")
    return "\n".join(lines)


def real_model() -> str:
    """What the real model's engine and update cost beside peers, without the title."""
    return (RESULTS / "real_model.md").read_text(encoding="utf-8").partition("\n")[2].strip()


def habit() -> str:
    """Success of the worst seeds before and after the habit was taught."""
    runs = results("habit.json")["runs"]
    skill, hidden = (
        {way: fold(run[way] for run in runs if run["arm"] == stage) for way in ("sampled", "greedy")}
        for stage, fold in (("skill", min), ("habit", max))
    )
    return (
        f"Before the habit was taught, each seed's model was right in at least {skill['sampled']:.3f} (sampled) and "
        f"{skill['greedy']:.3f} (greedy);\nafter it in at most {hidden['sampled']:.3f} and {hidden['greedy']:.3f} "
        "(`python bench/arms.py habit`)."
    )


def success_by_seed(name: str) -> str:
    """A job, seed by seed."""
    seeds = results(name)["seeds"]
    lines = [f"| {item['seed']} | {_rates(item)} |" for item in seeds]
    return "\n".join([f"| seed | {' | '.join(way.replace('_', ' ') for way in WAYS)} |", "|--:" * 5 + "|", *lines])


def tasksets() -> str:
    """Tasksets of verifiers by SmolLM2: rewards of the first and the last steps."""
    lines = []
    for name in ("alphabet-sort", "reverse-text"):
        for item in results(f"{name}.json")["seeds"]:
            first, last = mean(item["reward"][:ENDS]), mean(item["reward"][-ENDS:])
            steps, kl = len(item["reward"]), item["mismatch_kl"]
            lines.append(f"| {name} | {item['seed']} | {steps} | {first:.3f} | {last:.3f} | {kl:.1e} |")
    heads = ["taskset", "seed", "steps", f"reward, first {ENDS}", f"last {ENDS}", "mismatch KL, most"]
    return "\n".join([f"| {' | '.join(heads)} |", "|---|" + "--:|" * 5, *lines])


def second() -> str:
    """The second job, seed by seed: all kinds of trails, and the longest."""
    seeds = results("second.json")["seeds"]
    longest = (item["compared"]["by_kind"]["renamed_thrice"] for item in seeds)
    last = [f"{kind['greedy_before']:.3f} | {kind['greedy']:.3f}" for kind in longest]
    lines = [f"| {item['seed']} | {_rates(item)} | {end} |" for item, end in zip(seeds, last, strict=True)]
    heads = [*(way.replace("_", " ") for way in WAYS), "four lookups, greedy before", "four lookups, greedy"]
    return "\n".join([f"| seed | {' | '.join(heads)} |", "|--:" * 7 + "|", *lines])


def seeds_with_cost(name: str) -> str:
    """A job, seed by seed, with what it cost in all."""
    seeds = results(name)["seeds"]
    lines = [f"| {item['seed']} | {_rates(item)} | {item['warm_core_s'] + item['grpo_core_s']:.0f} |" for item in seeds]
    heads = [*(way.replace("_", " ") for way in WAYS), "core-s of training"]
    return "\n".join([f"| seed | {' | '.join(heads)} |", "|--:" * 6 + "|", *lines])


def made_tasks() -> str:
    """How many tasks `make-tasks` made from servers of others, and from how many chains."""
    report = (RESULTS / "made_tasks.md").read_text(encoding="utf-8")
    pattern = r"## (`.+`.*)\n(?:\n.*)*?\n(\d+) tasks of .* from (\d+) chains, in (\d+) s"
    lines = [f"| {' | '.join(found)} |" for found in re.findall(pattern, report)]
    return "\n".join(["| server | tasks | chains tried | seconds |", "|---|--:|--:|--:|", *lines])


def sight() -> str:
    """The vision job, and the images of a task."""
    seeds = results("sight.json")["seeds"]
    names = ("blank", "exchanged", "follows")
    heads = (*(way.replace("_", " ") for way in WAYS), "images blanked", "exchanged", "answers follow them")
    lines = [f"| seed | {' | '.join(heads)} |", "|--:" * (len(heads) + 1) + "|"]
    for item in seeds:
        others = (f"{item['controls'][name]:.3f}" for name in names)
        lines.append(f"| {item['seed']} | {_rates(item)} | {' | '.join(others)} |")
    lines += ["", "![The house from outside, and the lit room](images/sight.png)"]
    return "\n".join(lines)


def ablations() -> str:
    """Ablations: means over seeds, half-way and at the end."""
    arms: dict[str, list[Mapping[str, Any]]] = {}
    for item in results("ablations.json")["runs"]:
        arms.setdefault(item["arm"], []).append(item)
    lines = []
    for arm, runs in arms.items():
        rates = [[mean(run[way][at] for run in runs) for way in ("sampled", "greedy")] for at in ("30", "60")]
        lines.append(f"| {arm} | {' | '.join(f'{sampled:.2f} / {greedy:.2f}' for sampled, greedy in rates)} |")
    return "\n".join(["| success, sampled / greedy | at step 30 | at step 60 |", "|---|--:|--:|", *lines])


def algorithms() -> str:
    """The worst seed of each algorithm on tasks within the model's reach, and how soon training came there."""
    lines = []
    for name, runs in group_by_arm(results("algorithms.json")["runs"]).items():
        steps = [steps_to(run["success"], CEILING) for run in runs]
        reached = ", ".join("never" if step is None else str(step) for step in steps)
        lines.append(f"| {name} | {min(run['after'] for run in runs):.3f} | {reached} |")
    return "\n".join([f"| algorithm | after, worst seed | steps to {CEILING} |", "|---|--:|--:|", *lines])


def memory() -> str:
    """The planned memory as a share of the measured peak, by size."""
    sizes: dict[str, list[Mapping[str, Any]]] = {}
    for row in results("memory.json")["rows"]:
        sizes.setdefault(row["size"], []).append(row)
    lines = [
        f"| {size} | {min(row['ratio'] for row in rows):.2f} to {max(row['ratio'] for row in rows):.2f} |"
        for size, rows in sizes.items()
    ]
    return "\n".join(["| weights | planned / measured |", "|---|--:|", *lines])


def step() -> str:
    """The cost of a GRPO step in mtrl and TRL."""
    record = results("trainer.json")
    ours, figures = record["figures"]["mtrl"], record["figures"]
    peer = record["about"]["versions"].rpartition("; ")[2]
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
    """Prefix-cache hits by kind of routing."""
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
    """A run whose server was killed repeatedly, and the same run undisturbed."""
    record = results("kills.json")
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
        f"| {title} | " + " | ".join(f"{record[of][run][name]:{form}}" for run in ("struck", "undisturbed")) + " |"
        for title, (of, name, form) in rows.items()
    ]
    faults = sum(record["found"]["struck"]["faults"].values())
    return "\n".join([f"| | its server struck {faults} times | in peace |", "|---|--:|--:|", *lines])


NOT_ON_A_GPU = "Nothing was measured on a GPU yet: `make bench-gpu` does, wherever there is one."


def gpu() -> str:
    """The figures of the last run on a GPU, if there was one."""
    lines = _on_gpu()
    return format_figures(lines) if lines else NOT_ON_A_GPU


def gpu_in_short() -> str:
    """The README's line about GPU results."""
    lines = _on_gpu()
    if not lines:
        return NOT_ON_A_GPU
    about = lines[0]["about"]
    return f"Measured on {about['device']}, {about['date']}: [on a GPU](docs/results.md#on-a-gpu)."


def _on_gpu() -> list[Any]:
    return list(results("gpu.json")) if (RESULTS / "gpu.json").exists() else []


PARTS: Mapping[str, Callable[[], str]] = {
    "real": real_in_full,
    "real_model": real_model,
    "learned": learned,
    "habit": habit,
    "second": second,
    "agent": partial(seeds_with_cost, "agent.json"),
    "mcp_tasks": partial(seeds_with_cost, "mcp-tasks.json"),
    "bandit": partial(success_by_seed, "bandit.json"),
    "guess": partial(success_by_seed, "guess.json"),
    "lake": partial(success_by_seed, "lake.json"),
    **{f"smollm2_{game}": partial(seeds_with_cost, f"smollm2-{game}.json") for game in ("guess", "lake", "bandit")},
    "tasksets": tasksets,
    "shell": partial(success_by_seed, "shell.json"),
    "algorithms": algorithms,
    "ablations": ablations,
    "sight": sight,
    "kills": kills,
    "routing": routing,
    "step": step,
    "memory": memory,
    "gpu": gpu,
    "costs": costs,
    "scale": scale,
    "conformance": conformance,
    "soak": lambda: format_growths(results("soak.json")["loads"]),
}


IN_README: Mapping[str, Callable[[], str]] = {
    "first_run": first_run,
    "real": real,
    "learned": learned_in_short,
    "conformance": conformance_in_short,
    "costs": costs,
    "gpu": gpu_in_short,
}
PAGES: Mapping[Path, Mapping[str, Callable[[], str]]] = {
    README: IN_README,
    PAGE: PARTS,
    PAGE.with_name("made-tasks.md"): {"made_tasks": made_tasks},
}


def filled(text: str, parts: Mapping[str, Callable[[], str]] = PARTS) -> str:
    """A page with its marked parts replaced."""
    for name, table in parts.items():
        mark = re.compile(rf"(<!-- {name} -->\n\n).*?(\n\n<!-- /{name} -->)", re.DOTALL)
        text, found = mark.subn(lambda marks, table=table: marks[1] + table() + marks[2], text)  # type: ignore[misc]
        if found != 1:
            raise SystemExit(f"the marks <!-- {name} --> ... <!-- /{name} --> are there {found} times, not once")
    return text


def main() -> int:
    differ = 0
    for page, parts in PAGES.items():
        now = page.read_text(encoding="utf-8")
        new = filled(now, parts)
        if "--write" in sys.argv[1:]:
            page.write_text(new, encoding="utf-8")
        elif new != now:
            print(f"{page.relative_to(ROOT)} has other numbers than bench/results; run: python bench/readme.py --write")
            differ = 1
    if "--write" in sys.argv[1:]:
        copyfile(RESULTS / IMAGE.name, IMAGE)
    return differ


if __name__ == "__main__":
    raise SystemExit(main())
