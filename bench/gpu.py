"""All GPU benchmarks in one command: correctness gates, the default job, rollout and update throughput, weight sync.

python bench/gpu.py                    # writes bench/results/gpu-DATE.{json,md} after each part
python bench/gpu.py --small            # smoke test of every part, with a GPU or without
python bench/gpu.py --options "--attention-backend triton --sampling-backend pytorch"     # for each server

SGLang is found as by `mtrl-train --engine sglang`: in `.sglang`, or by `MTRL_SGLANG_PYTHON`. On a machine without a
network, with packages for the servers in one folder and the trainer's in another:

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
from gpu_idle import GpuIdleMeter  # noqa: E402
from gpu_table import COLOCATED_JOB, JOB, check_bars, format_results  # noqa: E402
from gpu_workload import SHAPES, ModelShape, build_random_model, measure_shape  # noqa: E402

from mtrl_plugins.demo.facts.facts_demo import build_model  # noqa: E402
from trainer.engine.sglang.server_process import ServerOptions, ServerProcess, find_python  # noqa: E402
from trainer.engine.sglang.sglang_engine import SGLangEngine  # noqa: E402
from trainer.engine.sglang.weight_sync.tensors import TensorSync  # noqa: E402
from trainer.engine.sglang.weight_sync.verify import TrainerReference  # noqa: E402
from trainer.policy.policy import Policy  # noqa: E402
from trainer.policy.settings import UpdateSettings  # noqa: E402
from trainer.storage.run_files import METRICS_FILE as METRICS  # noqa: E402
from trainer.storage.run_files import read_metrics  # noqa: E402

JOB_FILE = ROOT / "mtrl_plugins" / "demo" / "jobs" / "default.yaml"
RESULTS = ROOT / "bench" / "results"
DETERMINISTIC = "--enable-deterministic-inference"
NOT_MEASURED_ON_CPU = (
    f"{DETERMINISTIC}, which SGLang does not support on a CPU: that part ran without the option",
    "memory that is freed when engine and trainer take turns: a server without a GPU frees nothing",
    "CUDA IPC and NCCL: tensors went through the CPU's memory, and the process group used gloo",
    "GPU idle shares and the share of peak",
)


class GpuBench:
    """Runs the parts and writes the results after each of them, since a GPU machine may be lost before the last."""

    def __init__(self, small: bool, options: tuple[str, ...], out: Path | None, folder: Path) -> None:
        self.small, self.options, self.out, self.folder = small, options, out, folder
        self.cuda = torch.cuda.is_available()
        self.results: dict[str, Any] = {"about": describe_environment(self.cuda), "small": small}
        if not self.cuda:
            self.results["left_out"] = NOT_MEASURED_ON_CPU

    async def run_part(self, name: str, work: Callable[[], Awaitable[Mapping[str, Any]]]) -> bool:
        """Runs one part; returns whether it succeeded. A failure is recorded, and the other parts still run."""
        began = time.perf_counter()
        try:
            result = dict(await work())
        except Exception as error:  # boundary: a part runs the whole stack, and GPU time is expensive
            traceback.print_exc()
            result = {"problem": f"{type(error).__name__}: {error}"}
        self.results[name] = result | {"took_s": round(time.perf_counter() - began, 1)}
        print(f"{name}: {json.dumps(self.results[name])}", flush=True)
        if not self.small:
            self.results["bars"] = check_bars(self.results)
        self._write_results()
        return "problem" not in result

    @property
    def meets_bars(self) -> bool:
        """Whether all bars are met; a small run has none."""
        return all(bar["met"] for bar in self.results.get("bars", ()))

    def _write_results(self) -> None:
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
            name = f"gpu-{self.results['about']['date']}"
            (self.out / f"{name}.json").write_text(json.dumps(self.results, indent=1) + "\n")
            (self.out / f"{name}.md").write_text(format_results(self.results))

    def make_server(self, model: Path, name: str, *options: str, context: int | None = None) -> ServerProcess:
        """An SGLang server with the options of the command line."""
        tokens = None if self.cuda else 32768
        server_options = ServerOptions(context=context, cache_tokens=tokens, extra=(*self.options, *options))
        log = self.folder / f"{name}.log"
        return ServerProcess(model, server_options, log=log, notify=lambda line: print(line, flush=True))

    async def check_gates(self) -> Mapping[str, Any]:
        """The prerequisites of the other parts: SGLang starts, takes the trainer's weights, and its logprobs agree."""
        model = build_model(self.folder / "gate")
        policy = Policy.load(model, UpdateSettings())
        reference = TrainerReference(policy.compute_logprobs, policy.checkpoint_tensors, policy.image_processor)
        async with SGLangEngine([self.make_server(model, "gate")], TensorSync(), reference=reference) as engine:
            await engine.publish(policy.weights, 1)
            agreement = engine.agreement
            name = engine.capabilities.name
        assert agreement is not None
        return {
            "engine": name,
            "python": find_python().name,
            "most": agreement.max_difference,
            "mean": agreement.mean_difference,
        }

    async def run_job(self, colocated: bool = False) -> Mapping[str, Any]:
        """Runs the default job as a user does; or some steps of it with engine and trainer taking turns on the GPU."""
        run = self.folder / ("turns" if colocated else "job")
        file = run.with_suffix(".yaml")
        file.write_text(yaml.safe_dump(self._job_settings(colocated)))
        args = ["--tools", str(ROOT / "tool_configs"), "--config", str(file), "--out", str(run)]
        with GpuIdleMeter() as meter:
            done = await anyio.run_process([sys.executable, "-m", "trainer.cli", *args], cwd=ROOT, check=False)
        if done.returncode:
            raise RuntimeError(f"mtrl-train ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]!r}")
        steps = read_metrics(run / METRICS)
        phases = sorted({name for step in steps for name in step if name.startswith("time/")})
        return {
            "steps": int(steps[-1]["step"]),
            "greedy": steps[-1].get("eval/greedy"),
            "most_apart": max((step["mismatch/max"] for step in steps if "mismatch/max" in step), default=None),
            "seconds": {name: round(sum(step.get(name, 0.0) for step in steps), 2) for name in phases},
            "idle": meter.idle_share,
        }

    def _job_settings(self, colocated: bool) -> dict[str, Any]:
        serving: dict[str, Any] = {"options": list(self.options)}
        settings = yaml.safe_load(JOB_FILE.read_text()) | {"engine": "sglang", "serving": serving}
        if self.small:
            settings |= {"model": str(build_model(self.folder / "tiny")), "steps": 1, "prompts": 2, "n": 2}
            settings["evaluation"] = {"every": 1, "rows": 2, "final_rows": 2}
        if colocated:  # A second step generates with memory that the trainer gave back.
            serving["placement"] = "together"
            settings |= {"steps": 2 if self.small else 5, "evaluation": {"every": 0, "after": False}}
        return settings

    async def run_shape(self, shape: ModelShape, *options: str) -> Mapping[str, Any]:
        """Rollouts, updates and weight sync with a random model of a given shape."""
        model = await anyio.to_thread.run_sync(build_random_model, shape, self.folder / shape.name, self.cuda)
        server = self.make_server(model, shape.name, *options, context=shape.context)
        return await measure_shape(server, model, shape, self.cuda)


def describe_environment(cuda: bool) -> dict[str, str]:
    """Date, device, versions and commit."""
    device = torch.cuda.get_device_name() if cuda else f"no GPU: {os.cpu_count()} cores, {platform.machine()}"
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "mcp"))
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": device,
        "versions": f"Python {platform.python_version()}, {versions}",
        "commit": find_commit(),
    }


def find_commit() -> str:
    """The commit; unknown for a copy without its history, or without git."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    except OSError:
        return "unknown"
    return output.strip() or "unknown"


async def run_parts(bench: GpuBench) -> bool:
    """Runs all parts, or only the gates if these fail; returns whether all succeeded and met their bars."""
    if not await bench.run_part("gates", bench.check_gates):
        return False
    succeeded = await bench.run_part(JOB, bench.run_job)
    succeeded &= await bench.run_part(COLOCATED_JOB, partial(bench.run_job, colocated=True))
    shapes = SHAPES["small" if bench.small else "whole"]
    for shape in shapes:
        succeeded &= await bench.run_part(shape.name, partial(bench.run_shape, shape))
    deterministic = partial(bench.run_shape, shapes[0], *((DETERMINISTIC,) if bench.cuda else ()))
    succeeded &= await bench.run_part(f"{shapes[0].name}, deterministic", deterministic)
    return succeeded and bench.meets_bars


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--small", action="store_true")
    options.add_argument("--options", default="", help="further options of sglang.launch_server, for each server")
    options.add_argument("--out", type=Path, metavar="DIR", help="folder for results; a full run: bench/results")
    args = options.parse_args()
    out = args.out or (None if args.small or not torch.cuda.is_available() else RESULTS)
    with TemporaryDirectory() as folder:
        bench = GpuBench(args.small, tuple(shlex.split(args.options)), out, Path(folder))
        succeeded = anyio.run(run_parts, bench)
    print(format_results(bench.results))
    return int(not succeeded)


if __name__ == "__main__":
    raise SystemExit(main())
