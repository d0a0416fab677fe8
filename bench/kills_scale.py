"""Kills random processes of a job on two machines with -9, and compares it with the same job undisturbed.

python bench/kills_scale.py                        # 20 kills, about ten minutes; bench/results/kills_scale.{json,md}
python bench/kills_scale.py --kills 3 --steps 12   # fewer; writes nothing without --out

The machines are network namespaces. On the first one torchrun's agent runs rank 0, which orchestrates; on the second
one another agent runs rank 1, and a rollout worker, a gateway, and a stand-in for an SGLang server (with a real tiny
model) run beside it. A killed process is started again as a service manager would. Needs root.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import psutil  # noqa: E402

from bench.kills_scale_table import format_results  # noqa: E402
from bench.machines import PYTHON, Machine, Service, two_machines  # noqa: E402
from gateway.types import Outcome  # noqa: E402
from trainer.rollout.steppers import CALLS_INFO  # noqa: E402
from trainer.storage.rollout_file import Rollouts  # noqa: E402
from trainer.storage.run_files import read_metrics  # noqa: E402

RESULTS = ROOT / "bench" / "results"
KILLS, STEPS_EACH = 20, 1
"""Kills, and the steps of the job for each: each kill hits other steps."""
SETTLE_S, STEP_S = 240.0, 180.0
RENDEZVOUS_PORT, WORKERS_PORT, GATEWAY_PORT, SERVER_PORT = 29400, 8790, 8765, 30000
KINDS = ("rank 0", "rank 1", "agent 0", "agent 1", "worker", "gateway", "server")
LOSSES = ("loss", "update/grad_norm", "reward/mean")
TOLERANCE = 1e-5
"""How far losses may differ, relative to them or 1: the ranks' sums round differently from run to run."""
TOOL = '''
import os
from pathlib import Path

from mtrl_plugins.demo.facts.lookup import LookUp

CALLS = Path({file!r})


class Counted(LookUp):
    """Writes a line for each call, and names it in the call's metrics, by which it is found in its rollout."""

    async def execute(self, instance_id, parameters, **kwargs):
        name = f"{{instance_id}}/{{os.urandom(6).hex()}}"
        with CALLS.open("a") as calls:
            calls.write(name + "\\n")
        response, reward, metrics = await super().execute(instance_id, parameters, **kwargs)
        return response, reward, {{**metrics, "execution": name}}


def calculate(expression: str) -> str:
    """Works out a sum."""
    return "0"
'''


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=KILLS)
    options.add_argument("--steps", type=int, help=f"steps of the job; by default {STEPS_EACH} for each kill, and 4")
    options.add_argument("--only", nargs="*", choices=KINDS, default=KINDS, help="kill only these")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--out", type=Path, metavar="DIR", help="folder for results; a full run: bench/results")
    options.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs and all logs in this folder")
    args = options.parse_args()
    steps = args.steps or STEPS_EACH * args.kills + 4
    with TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        results = {}
        for name, kills in (("undisturbed", 0), ("killed", args.kills)):
            results[name] = run_job(folder / name, steps, choose_kills(kills, args.only, args.seed), args.seed)
    content = summarize(results) | {"about": describe_machine(), "steps": steps}
    print(json.dumps(content, indent=1))
    out = args.out or (RESULTS if args.kills >= KILLS and args.steps is None else None)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "kills_scale.json").write_text(json.dumps(content, indent=1) + "\n")
        (out / "kills_scale.md").write_text(format_results(content))
    return int(not content["kept"])


def choose_kills(count: int, kinds: Sequence[str], seed: int) -> list[str]:
    """What is killed, in order: every kind as often as the others, as far as that goes."""
    draw, chosen = random.Random(seed), []
    while len(chosen) < count:
        chosen += draw.sample(list(kinds), len(kinds))
    return chosen[:count]


def run_job(folder: Path, steps: int, kills: Sequence[str], seed: int) -> dict[str, Any]:
    """Runs the job under kills, and returns what is found in its run."""
    folder.mkdir(parents=True)
    began = time.monotonic()
    with two_machines() as machines:
        services = make_services(folder, machines, steps)
        with ExitStack() as stack:
            for service in services.values():
                stack.callback(service.end)
                service.start()
            killed = inject_kills(folder / "run", services, kills, random.Random(seed))
            wait_for_end(folder, services)
            starts = {name: service.starts for name, service in services.items()}
    return read_run(folder, steps) | {
        "kills": killed, "starts": starts, "wall_s": round(time.monotonic() - began, 1),
    }  # fmt: skip


def make_services(folder: Path, machines: tuple[Machine, Machine], steps: int) -> dict[str, Service]:
    """The job's processes, by name."""
    first, second = machines
    run_file = write_files(folder, machines, steps)
    token = {"MTRL_WORKER_TOKEN": secrets.token_hex(16), "MTRL_GATEWAY_TOKEN": (folder / "token").read_text()}
    token |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    model = json.loads(run_file.read_text())["model"]
    commands = {
        "gateway": (second, ["-m", "gateway.cli", "serve", "--tools", "tools", "--host", second.address, "--port",
                             str(GATEWAY_PORT), "--token-file", "token"]),
        "server": (second, ["-m", "tests.trainer.engine_sglang.model_server", model, second.address, str(SERVER_PORT)]),
        "agent 0": (first, torchrun(first, first)),
        "agent 1": (second, torchrun(first, second)),
        "worker": (second, ["-m", "trainer.cli", "worker", "--connect", f"{first.address}:{WORKERS_PORT}",
                            "--name", "worker"]),
    }  # fmt: skip
    return {
        name: Service(
            name, machine, [PYTHON, *words], folder / f"{name.replace(' ', '-')}.log", folder=folder,
            environment={**token, "GLOO_SOCKET_IFNAME": machine.interface}, may_end=name.startswith("agent"),
        )
        for name, (machine, words) in commands.items()
    }  # fmt: skip


def torchrun(first: Machine, own: Machine) -> list[str]:
    """An agent of torchrun with one rank."""
    place = f"{first.address}:{RENDEZVOUS_PORT}"
    options = f"--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint {place} --rdzv-id kills"
    options += f" --rdzv-conf is_host={int(own is first)} --local-addr {own.address} --max-restarts 1000"
    options += " --monitor-interval 0.2"
    command = ["-m", "trainer.cli", "--config", "run.yaml", "--out", "run", "--auto-resume"]
    return ["-m", "torch.distributed.run", *options.split(), *command]


def write_files(folder: Path, machines: tuple[Machine, Machine], steps: int) -> Path:
    """The run file, the tools, and the gateway's token."""
    from tests.trainer.train.jobs import small_job

    first, second = machines
    (folder / "tools").mkdir()
    (folder / "tools/counted.py").write_text(TOOL.format(file=str(folder / "calls")))
    (folder / "calls").touch()
    (folder / "tools/tools.yaml").write_text("tools: [{class_name: counted.Counted}, {function: counted:calculate}]\n")
    (folder / "token").write_text(secrets.token_hex(16))
    (folder / "weights").mkdir()
    settings = small_job(
        steps=steps, demo={"kinds": ("fact",)}, record=False, prompts=2, n=4, evaluation={"every": 0},
        tools=f"http://{second.address}:{GATEWAY_PORT}", engine=f"http://{second.address}:{SERVER_PORT}",
        serving={"weight_sync": f"disk:{folder / 'weights'}"}, checkpoint={"every": 1},
        rollout={"listen": f"{first.address}:{WORKERS_PORT}", "heartbeat_timeout_s": 10.0},
        limits={"assistant_turns": 4, "user_turns": 2, "tool_calls": 4, "turn_tokens": 24, "rollout_tokens": 160,
                "timeout_s": 300}, update={"lr": 1e-3, "warmup_steps": 1, "lr_scheduler": "linear"},
    )  # fmt: skip
    file = folder / "run.yaml"
    file.write_text(settings.model_dump_json())
    return file


def inject_kills(run: Path, services: Mapping[str, Service], kills: Sequence[str], draw: random.Random) -> list[Any]:
    """Kills one process after the other, each once the job has finished a step since the last one was back."""
    done = []
    for kind in kills:
        before = count_steps(run)
        wait(lambda before=before: count_steps(run) > before, SETTLE_S, f"no step after {done}")  # type: ignore[misc]
        time.sleep(draw.random())  # Anywhere within a step.
        process = find_process(kind, services)
        process.send_signal(signal.SIGKILL)
        done.append([kind, count_steps(run)])
        print(f"killed {kind} (process {process.pid}) after step {done[-1][1]}", file=sys.stderr, flush=True)
    return done


def find_process(kind: str, services: Mapping[str, Service]) -> psutil.Process:
    """The process of this kind, once it runs."""
    name, is_rank = kind.replace("rank", "agent"), kind.startswith("rank")
    found: list[psutil.Process] = []

    def is_found() -> bool:
        nonlocal found
        found = services[name].find_processes()
        if is_rank:
            found = [process for process in found[1:] if is_trainer(process)]
        return bool(found)

    wait(is_found, SETTLE_S, f"no process of {kind}")
    return found[0]


def is_trainer(process: psutil.Process) -> bool:
    """Whether it is a rank, below an agent, which has the same words."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return "trainer.cli" in words and "torch.distributed.run" not in words


def wait_for_end(folder: Path, services: Mapping[str, Service]) -> None:
    ends = [services[name].is_done for name in ("agent 0", "agent 1")]
    steps = json.loads((folder / "run.yaml").read_text())["steps"]
    while count_steps(folder / "run") < steps:
        before = count_steps(folder / "run")
        wait(lambda before=before: count_steps(folder / "run") > before, SETTLE_S, "no further step")  # type: ignore[misc]
    wait(lambda: all(end.is_set() for end in ends), STEP_S, "the agents did not end")


def count_steps(run: Path) -> int:
    """The last step in the metrics."""
    file = run / "metrics.jsonl"
    lines = file.read_bytes().splitlines() if file.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def wait(condition: Any, within_s: float, problem: str) -> None:
    """Raises RuntimeError if the condition does not come true."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{problem} within {within_s:g} s")
        time.sleep(0.05)


def read_run(folder: Path, steps: int) -> dict[str, Any]:
    """The run's losses, and what of its rollouts and calls is missing or there twice."""
    settings = json.loads((folder / "run.yaml").read_text())
    rollouts, metrics = list(Rollouts(folder / "run")), read_metrics(folder / "run/metrics.jsonl")
    trained = [rollout for rollout in rollouts if not rollout.stop.is_infrastructure]
    executed = Counter(line.partition("/")[0] for line in (folder / "calls").read_text().splitlines())
    known: Counter[str] = Counter()
    for rollout in trained:
        known.update(name.partition("/")[0] for name in find_executions(rollout))
    return {
        "steps": len(metrics),
        **count_rollouts([(rollout.group, rollout.index) for rollout in trained], steps, settings),
        "made_anew": len(rollouts) - len(trained),
        "calls": sum(known.values()),
        "executed": sum(executed.values()),
        "executed_twice": sum(executed[name] - count for name, count in known.items()),
        "losses": [{name: step[name] for name in LOSSES if name in step} for step in metrics],
    }


def count_rollouts(names: Sequence[tuple[str, int]], steps: int, settings: Mapping[str, Any]) -> dict[str, int]:
    """How many rollouts there are, how many of the job are missing, and how many there are beyond one of each name."""
    expected = {(f"{step}-0-{group}", index) for step in range(1, steps + 1)
                for group in range(settings["prompts"]) for index in range(settings["n"])}  # fmt: skip
    present = expected & {*names}
    return {"rollouts": len(names), "missing": len(expected - present), "doubled": len(names) - len(present)}


def find_executions(rollout: Any) -> list[str]:
    """The executions that a rollout's answered calls name."""
    calls = [call for ledger in rollout.ledgers for entry in ledger for call in entry.info.get(CALLS_INFO, ())]
    calls = [call for call in calls if call["name"] == "look_up"]
    return [call["metrics"]["execution"] for call in calls if call["outcome"] == Outcome.OK]


def summarize(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Both runs, the largest difference of their losses, and whether every promise was kept."""
    quiet, killed = results["undisturbed"], results["killed"]
    pairs = [
        (first.get(name), second.get(name))
        for first, second in zip(quiet["losses"], killed["losses"], strict=True)
        for name in LOSSES
    ]
    apart = max(map(difference, pairs))
    losses = sum(a is not None for a, _ in pairs[:: len(LOSSES)])
    intact = all(not run[name] for run in results.values() for name in ("missing", "doubled", "executed_twice"))
    shown = {name: {key: value for key, value in run.items() if key != "losses"} for name, run in results.items()}
    kept = intact and apart <= TOLERANCE and losses > 0
    return {"found": shown, "losses": losses, "apart": apart, "tolerance": TOLERANCE, "kept": kept}


def difference(pair: tuple[float | None, float | None]) -> float:
    """How far two values are apart, relative to the first or 1; a step without a gradient has no loss in either run."""
    first, second = pair
    if first is None or second is None:
        return 0.0 if first is second else math.inf
    return abs(first - second) / max(1.0, abs(first))


def describe_machine() -> dict[str, str]:
    """Date and machine."""
    machine = f"{os.cpu_count()} cores, {platform.machine()}; two network namespaces joined by a veth pair"
    return {"date": time.strftime("%Y-%m-%d"), "machine": machine, "python": platform.python_version()}


if __name__ == "__main__":
    raise SystemExit(main())
