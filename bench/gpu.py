"""All GPU measurements in one command, in parts by value: each a process with a deadline, each figure told at once.

python bench/gpu.py                                   # all; writes bench/results/gpu.jsonl as it goes, and gpu.json
python bench/gpu.py --budget 560 --out $OUT           # what fits into 560 s: a part that would not is skipped
python bench/gpu.py --only floors gates rollouts      # some
python bench/gpu.py --options "--attention-backend triton --sampling-backend pytorch"      # for each server
python bench/gpu.py --policy FOLDER                   # the model of word problems and of other jobs; or --job job.yaml
python bench/gpu.py --small --engine sglang           # every part on a CPU, in small; by default with the torch engine
python bench/gpu.py --table FILE.jsonl                # figures as a table

A part that fails, hangs or is killed costs no other part's figures, and its own stay that it told before. What one
device cannot do is skipped with its reason. SGLang is found as by `mtrl-train --engine sglang`; where there is no
network, `make offline-bundle` brings it (docs/scaling.md), and MTRL_TRL_PYTHON names a Python that has TRL.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import anyio  # noqa: E402
import torch  # noqa: E402
from anyio.streams.text import TextReceiveStream  # noqa: E402
from gpu_table import format_figures  # noqa: E402
from gpu_workload import SHAPES, build_random_model  # noqa: E402

from trainer.engine.base import EngineError  # noqa: E402
from trainer.engine.sglang.server_process import ServerOptions, ServerProcess  # noqa: E402

RESULTS = ROOT / "bench" / "results"
START_S = 180.0
SMALL_DEADLINE_S = 600.0
"""Of a server's start and of each part, on a CPU."""
CPU_TOKENS = 32768
"""The KV cache of a server without a GPU."""


@dataclass(frozen=True, slots=True)
class Part:
    """One measurement. It starts if `takes_s` are left of the budget, and is ended after `deadline_s`."""

    name: str
    run: str
    """The function of `gpu_parts.py`."""
    takes_s: float
    deadline_s: float
    shape: str = "0.5B"
    needs_server: bool = False


PARTS = (
    Part("floors", "floors", 15, 60),
    Part("gates", "gates", 20, 90, needs_server=True),
    Part("rollouts", "rollouts", 45, 120, needs_server=True),
    Part("publishing", "publishing", 20, 90, needs_server=True),
    Part("update 0.5B", "update", 45, 120),
    Part("TRL 0.5B", "trl", 55, 150),
    Part("update 1.5B", "update", 45, 120, shape="1.5B"),
    Part("kernels", "kernels", 40, 120),
    Part("memory", "memory", 60, 180),
    Part("learning", "learning", 170, 260),
    Part("resuming", "resuming", 60, 180),
    Part("embedded engine", "embedded", 75, 200),
)
"""In order of value, one after the other: nothing else runs while a figure is taken."""


@dataclass
class Bench:
    """Runs parts, one at a time, and writes each of their figures when it comes."""

    arguments: argparse.Namespace
    work: Path
    file: TextIO
    began: float = field(default_factory=time.monotonic)
    failed: list[str] = field(default_factory=list)
    start_error: str = ""
    """Why the server did not start: it is not tried again, which may take minutes."""

    @property
    def logs(self) -> Path:
        """Where logs are kept: beside the figures, if those are wanted anywhere."""
        folder: Path = self.arguments.out or self.work
        return folder

    def tell(self, **line: Any) -> None:
        """Writes a line to the terminal and to the file, and makes sure that it is there."""
        text = json.dumps(line | {"at_s": round(time.monotonic() - self.began, 1)})
        print(text, flush=True)
        self.file.write(text + "\n")
        self.file.flush()
        os.fsync(self.file.fileno())

    @property
    def left_s(self) -> float:
        """What is left of the budget."""
        budget: float = self.arguments.budget
        return budget - (time.monotonic() - self.began)

    async def run(self, parts: Sequence[Part]) -> None:
        """Runs the parts: the server stands while there are parts that need it, and no longer."""
        async with AsyncExitStack() as stack:
            server: ServerProcess | None = None
            waiting = [part for part in parts if part.needs_server]
            for part in parts:
                if part.needs_server:
                    if self.start_error:
                        self._fail(part, f"its server did not start: {self.start_error}")
                        continue
                    if server is None or not server.alive:
                        server = await self._start_server(stack, part)
                    if server is None:
                        continue
                    waiting.remove(part)
                await self._run_part(part, server.url if server and part.needs_server else "")
                if server is not None and not waiting:
                    await stack.aclose()
                    server = None

    async def _start_server(self, stack: AsyncExitStack, part: Part) -> ServerProcess | None:
        """A server for this part and the next; None, and the part has failed, if it does not start."""
        if self.left_s < part.takes_s:
            self.tell(part=part.name, skipped=f"the budget of {self.arguments.budget:.0f} s is spent")
            return None
        began = time.monotonic()
        shape = SHAPES["tiny" if self.arguments.small else part.shape]
        model = build_random_model(shape, self.work / shape.name, torch.cuda.is_available())
        options = ServerOptions(
            context=shape.context,
            cache_tokens=None if torch.cuda.is_available() else CPU_TOKENS,
            extra=tuple(self.arguments.options.split()),
            start_s=max(1.0, min(SMALL_DEADLINE_S if self.arguments.small else START_S, self.left_s)),
        )
        server = ServerProcess(model, options, log=self.logs / "server.log")
        try:
            await stack.enter_async_context(server)
        except EngineError as error:
            self.start_error = str(error)
            self._fail(part, self.start_error)
            return None
        self.tell(part="server", figure="ready", value=round(time.monotonic() - began, 1), unit="s")
        return server

    def _fail(self, part: Part, reason: str) -> None:
        self.failed.append(part.name)
        self.tell(part=part.name, failed=reason)

    async def _run_part(self, part: Part, url: str) -> None:
        deadline_s = min(SMALL_DEADLINE_S if self.arguments.small else part.deadline_s, self.left_s)
        if self.left_s < (0 if self.arguments.small else part.takes_s):
            return self.tell(part=part.name, skipped=f"the budget of {self.arguments.budget:.0f} s is spent")
        began = time.monotonic()
        log = self.logs / f"{part.name}.log"
        with log.open("wb") as errors:
            process = await anyio.open_process(
                self._command(part, url), stdin=subprocess.DEVNULL, stderr=errors, start_new_session=True
            )
            self.tell(part=part.name, process=process.pid)
            try:
                with anyio.move_on_after(deadline_s) as scope:
                    assert process.stdout is not None
                    await self._tell_figures(part, TextReceiveStream(process.stdout, errors="replace"))
                    await process.wait()
            finally:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)  # and whatever it started
                with anyio.CancelScope(shield=True):
                    await process.aclose()
        taken = round(time.monotonic() - began, 1)
        if scope.cancelled_caught:
            self._fail(part, f"ended after its {deadline_s:.0f} s: {_end(log)}")
        elif process.returncode:
            self._fail(part, f"ended with {process.returncode}: {_end(log)}")
        else:
            self.tell(part=part.name, took_s=taken)

    def _command(self, part: Part, url: str) -> list[str]:
        small = self.arguments.small
        shape = "tiny" if small else part.shape
        engine = self.arguments.engine or ("torch" if small else "sglang")
        command = [sys.executable, str(ROOT / "bench" / "gpu_parts.py"), part.run, "--shape", shape]
        command += ["--work", str(self.work), "--url", url, "--engine", engine, f"--options={self.arguments.options}"]
        command += ["--small"] if small else []
        command += ["--job", str(self.arguments.job)] if self.arguments.job else []
        return [*command, "--policy", str(self.arguments.policy)] if self.arguments.policy else command

    async def _tell_figures(self, part: Part, output: TextReceiveStream) -> None:
        """Passes on each line of JSON; whatever else a library prints is left in the part's own output."""
        rest = ""
        async for piece in output:
            *lines, rest = (rest + piece).split("\n")
            for line in lines:
                with suppress(ValueError, TypeError):
                    self.tell(part=part.name, **json.loads(line))


def _end(log: Path) -> str:
    return log.read_text(errors="replace").strip()[-600:]


def describe_environment() -> dict[str, str]:
    """Date, device, versions and commit."""
    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if cuda else f"no GPU: {os.cpu_count()} cores, {platform.machine()}"
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "mcp"))
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": device,
        "versions": f"Python {platform.python_version()}, {versions}",
        "commit": find_commit(),
        "command": " ".join(["python", *sys.argv]),
    }


def find_commit() -> str:
    """The commit; unknown for a copy without its history, or without git."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    except OSError:
        return "unknown"
    return output.strip() or "unknown"


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The lines of a run; a last one that was cut off is left out."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):
            lines.append(json.loads(line))
    return lines


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in PARTS]
    options.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART", help=", ".join(names))
    options.add_argument("--budget", type=float, default=3600.0, metavar="SECONDS", help="for all of it")
    options.add_argument("--out", type=Path, metavar="DIR", help="folder for gpu.jsonl, gpu.json and logs")
    options.add_argument("--options", default="", help="further options of sglang.launch_server, for each server")
    options.add_argument("--engine", choices=("sglang", "torch"), help="of the parts that run jobs")
    options.add_argument("--policy", type=Path, metavar="FOLDER", help="the model that learns word problems with tools")
    options.add_argument("--job", type=Path, metavar="FILE", help="another job; without --policy the default job")
    options.add_argument("--small", action="store_true", help="on a CPU")
    options.add_argument("--table", type=Path, metavar="FILE", help="only print this file's figures")
    return options.parse_args(words)


def main() -> int:
    arguments = parse_arguments()
    if arguments.table:
        print(format_figures(read_lines(arguments.table)))
        return 0
    with TemporaryDirectory() as folder:
        out: Path = arguments.out or (Path(folder) if arguments.small else RESULTS)
        out.mkdir(parents=True, exist_ok=True)
        with (out / "gpu.jsonl").open("w", encoding="utf-8") as file:
            bench = Bench(arguments, Path(folder), file)
            bench.tell(about=describe_environment())
            anyio.run(bench.run, [part for part in PARTS if part.name in arguments.only])
        lines = read_lines(out / "gpu.jsonl")
        (out / "gpu.json").write_text(json.dumps(lines, indent=0) + "\n", encoding="utf-8")
        print(format_figures(lines))
    return int(bool(bench.failed))


if __name__ == "__main__":
    raise SystemExit(main())
