"""All that is to be known of mtrl on a GPU, by one command; and on a CPU in small, so that no GPU waits for a typo.

python bench/gpu.py                    # writes bench/results/gpu-DATE.{json,md}, after each part what there is by then
python bench/gpu.py --small            # every part with next to nothing to do, with a GPU or without
python bench/gpu.py --options "--attention-backend triton --sampling-backend pytorch"     # for each server

SGLang is found as `mtrl-train --engine sglang` finds it: in `.sglang`, or by `MTRL_SGLANG_PYTHON`. On a machine without
a network, with packages for the servers in one folder and the trainer's in another:

export PYTHONPATH=$MTRL_PATH MTRL_SGLANG_PYTHON=$(command -v python3) MTRL_SGLANG_PYTHONPATH=$SGLANG_SERVER_PATH
export MTRL_TRL_PYTHONPATH=$TRL_PATH
python3 bench/gpu.py --options "--attention-backend triton --sampling-backend pytorch"
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import anyio  # noqa: E402
import torch  # noqa: E402
import yaml  # noqa: E402
from gpu_idle import Idle  # noqa: E402
from gpu_table import JOB, TURNS, judged, table  # noqa: E402
from gpu_work import SHAPES, Shape, model_of, worked  # noqa: E402

from trainer.demo.facts.model import build  # noqa: E402
from trainer.engine.sglang.engine import SGLangEngine  # noqa: E402
from trainer.engine.sglang.environment import python  # noqa: E402
from trainer.engine.sglang.own import Own  # noqa: E402
from trainer.engine.sglang.publish.tensors import ByTensors  # noqa: E402
from trainer.engine.sglang.server import Options, Server  # noqa: E402
from trainer.policy.policy import Policy  # noqa: E402
from trainer.policy.settings import UpdateSettings  # noqa: E402
from trainer.run.history import NAME as METRICS  # noqa: E402
from trainer.run.history import history  # noqa: E402

FILE = ROOT / "trainer" / "jobs" / "default.yaml"
RESULTS = ROOT / "bench" / "results"
EXACT = "--enable-deterministic-inference"
LEFT_OUT = (
    f"{EXACT}, which SGLang has for no CPU: that part ran as it does, without the option",
    "memory that comes free where engine and trainer take turns: a server without a GPU answers, and frees nothing",
    "CUDA IPC and NCCL: tensors went through the CPU's memory, and the process group was gloo's",
    "GPU idle shares and the share of peak",
)
"""Of a run without a GPU: what only one can show."""


class Bench:
    """What was found so far, on the disk after each part: a machine may be gone before the last."""

    def __init__(self, small: bool, words: tuple[str, ...], out: Path | None, folder: Path) -> None:
        self.small, self.words, self.out, self.folder = small, words, out, folder
        self.cuda = torch.cuda.is_available()
        self.told: dict[str, Any] = {"about": about(self.cuda), "small": small}
        if not self.cuda:
            self.told["left_out"] = LEFT_OUT

    async def part(self, name: str, work: Callable[[], Awaitable[Mapping[str, Any]]]) -> bool:
        """One that fails is told of and does not keep the others from being measured."""
        began = time.perf_counter()
        try:
            found = dict(await work())
        except Exception as error:  # boundary: a part is the user's whole stack; the minutes of a GPU are few
            traceback.print_exc()
            found = {"problem": f"{type(error).__name__}: {error}"}
        self.told[name] = found | {"took_s": round(time.perf_counter() - began, 1)}
        print(f"{name}: {json.dumps(self.told[name])}", flush=True)
        if not self.small:
            self.told["bars"] = judged(self.told)
        self._write()
        return "problem" not in found

    @property
    def kept(self) -> bool:
        """What is done in small is too little to be judged."""
        return all(one["met"] for one in self.told.get("bars", ()))

    def _write(self) -> None:
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
            name = f"gpu-{self.told['about']['date']}"
            (self.out / f"{name}.json").write_text(json.dumps(self.told, indent=1) + "\n")
            (self.out / f"{name}.md").write_text(table(self.told))

    def server(self, model: Path, name: str, *more: str, context: int | None = None) -> Server:
        tokens = None if self.cuda else 32768
        options = Options(context=context, tokens=tokens, more=(*self.words, *more))
        return Server(model, options, log=self.folder / f"{name}.log", told=lambda line: print(line, flush=True))

    async def gates(self) -> Mapping[str, Any]:
        """What all the rest stands on: SGLang starts, takes the trainer's weights, and finds a prompt as likely."""
        model = build(self.folder / "gate")
        policy = Policy.load(model, UpdateSettings())
        own = Own(policy.finds, policy.filed, policy.eyes)
        async with SGLangEngine([self.server(model, "gate")], ByTensors(), own=own) as engine:
            await engine.publish(policy.weights, 1)
            agreement = engine.agreement
            name = engine.capabilities.name
        assert agreement is not None
        return {"engine": name, "python": python().name, "most": agreement.most, "mean": agreement.mean}

    async def job(self, turns: bool = False) -> Mapping[str, Any]:
        """The default job to its bar, as a user runs it; or some steps of it between which the server lends memory."""
        run = self.folder / ("turns" if turns else "job")
        file = run.with_suffix(".yaml")
        file.write_text(yaml.safe_dump(self._settings(turns)))
        words = ["--tools", str(ROOT / "tool_configs"), "--config", str(file), "--out", str(run)]
        with Idle() as idle:
            done = await anyio.run_process([sys.executable, "-m", "trainer.cli", *words], cwd=ROOT, check=False)
        if done.returncode:
            raise RuntimeError(f"mtrl-train ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]!r}")
        steps = history(run / METRICS)
        spent = sorted({name for step in steps for name in step if name.startswith("time/")})
        return {
            "steps": int(steps[-1]["step"]),
            "greedy": steps[-1].get("eval/greedy"),
            "most_apart": max((step["mismatch/max"] for step in steps if "mismatch/max" in step), default=None),
            "seconds": {name: round(sum(step.get(name, 0.0) for step in steps), 2) for name in spent},
            "idle": idle.share,
        }

    def _settings(self, turns: bool) -> dict[str, Any]:
        serving: dict[str, Any] = {"options": list(self.words)}
        settings = yaml.safe_load(FILE.read_text()) | {"engine": "sglang", "serving": serving}
        if self.small:
            settings |= {"model": str(build(self.folder / "tiny")), "steps": 1, "prompts": 2, "n": 2}
            settings["evaluation"] = {"every": 1, "few": 2, "rows": 2}
        if turns:  # A second step is written with what came back after the first.
            serving["placement"] = "together"
            settings |= {"steps": 2 if self.small else 5, "evaluation": {"every": 0, "after": False}}
        return settings

    async def shape(self, shape: Shape, *more: str) -> Mapping[str, Any]:
        model = await anyio.to_thread.run_sync(model_of, shape, self.folder / shape.name, self.cuda)
        server = self.server(model, shape.name, *more, context=shape.context)
        return await worked(server, model, shape, self.cuda)


def about(cuda: bool) -> dict[str, str]:
    device = torch.cuda.get_device_name() if cuda else f"no GPU: {os.cpu_count()} cores, {platform.machine()}"
    names = ("torch", "transformers", "mcp")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": device,
        "versions": f"Python {platform.python_version()}, {versions}",
        "commit": commit(),
    }


def commit() -> str:
    """A copy without its history, or a machine without git, does not know."""
    words = ["git", "rev-parse", "--short", "HEAD"]
    try:
        told = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    except OSError:
        return "unknown"
    return told.strip() or "unknown"


async def measured(bench: Bench) -> bool:
    """Whether all went well and came to its bar. Without what the rest stands on, nothing else is begun."""
    if not await bench.part("gates", bench.gates):
        return False
    well = await bench.part(JOB, bench.job)
    well &= await bench.part(TURNS, partial(bench.job, turns=True))
    shapes = SHAPES["small" if bench.small else "whole"]
    for shape in shapes:
        well &= await bench.part(shape.name, partial(bench.shape, shape))
    exact = partial(bench.shape, shapes[0], *((EXACT,) if bench.cuda else ()))
    well &= await bench.part(f"{shapes[0].name}, deterministic", exact)
    return well and bench.kept


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--small", action="store_true")
    options.add_argument("--options", default="", help="further ones of sglang.launch_server, for each server")
    options.add_argument("--out", type=Path, metavar="DIR", help="where the results go; of a full run, bench/results")
    asked = options.parse_args()
    out = asked.out or (None if asked.small or not torch.cuda.is_available() else RESULTS)
    with TemporaryDirectory() as folder:
        bench = Bench(asked.small, tuple(shlex.split(asked.options)), out, Path(folder))
        well = anyio.run(measured, bench)
    print(table(bench.told))
    return int(not well)


if __name__ == "__main__":
    raise SystemExit(main())
