"""Runs in a network namespace with loopback alone, in Ray's Python: a small cluster with ranks and servers.

Writes a JSON line about each part to shown.jsonl. Ray dials the machine's own address and a public resolver wherever it
can.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gateway.errors import ConfigError
from mtrl_plugins.cluster import ray_launcher
from mtrl_plugins.cluster.node_process import PYTHON, NodeProcess
from mtrl_plugins.cluster.ray_launcher import RayJob, connect, run_on_ray

RANK = """
import json, os, sys, time
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "EXTRA")
with open(f"rank-{os.environ['RANK']}.jsonl", "a") as log:
    log.write(json.dumps([sys.argv[1:], {name: os.environ.get(name) for name in names}, os.getpid()]) + "\\n")
if "--resume" in sys.argv:
    sys.exit(0)
if os.environ["RANK"] == "1":
    deadline = time.monotonic() + 60
    while len([name for name in os.listdir() if name.startswith("rank-")]) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    if "--kill-actor" in sys.argv:
        os.kill(os.getppid(), 9)
        time.sleep(300)
    sys.exit(7)
time.sleep(300)
"""
LEADER_KNOWS = """
import os, signal, sys, time
while os.environ["RANK"] == "1":
    if os.path.exists("handled"):
        sys.exit(1)
    time.sleep(0.05)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))
open("handled", "w").close()
time.sleep(300)
"""
SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
HTTPServer(("0.0.0.0", int(sys.argv[sys.argv.index("--port") + 1])), Health).serve_forever()
"""


def main(folder: Path) -> None:
    os.chdir(folder)
    Path("rank.py").write_text(RANK)
    package = Path("sglang")
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text(SERVER)
    ray, logs = connect("auto"), folder / "logs"
    notes: list[str] = []
    show("resources", ray.cluster_resources()["CPU"])
    values = {"gpus": False, "retries": 1, "environment": {"EXTRA": "a b"}}
    command = (PYTHON, "rank.py", "--config", "it's.yaml")
    failing = RayJob(command, 2, folder, logs, lambda again: again, servers=1, **values)
    show("failed rank", run_on_ray(ray, failing, notes.append))
    show("starts", [starts_of(rank) for rank in range(2)])
    killed = RayJob((*command, "--kill-actor"), 2, folder, logs, lambda again: again, **values)
    show("killed actor", run_on_ray(ray, killed, notes.append))
    show("left", [pid for rank in range(2) for _, _, pid in starts_of(rank) if is_alive(pid)])
    for code in (2, 3):
        end = RayJob(
            (PYTHON, "-c", f"print('why {code}'); raise SystemExit({code})"), 1, folder, logs, gpus=False, retries=1
        )
        show(f"code {code}", run_on_ray(ray, end, notes.append))
    knows = RayJob((PYTHON, "-c", LEADER_KNOWS), 2, folder, folder / "other-logs", gpus=False, retries=1)
    of_leader: list[str] = []
    show("leader knows", run_on_ray(ray, knows, of_leader.append))
    show("leader's notes", of_leader)
    rank_0 = ray.remote(num_cpus=0)(NodeProcess).remote()
    ray.get(rank_0.free_port.remote())
    ray.kill(rank_0)
    show("lost leader", ray_launcher._ask_rank_0(ray, rank_0))
    show("notes", notes)
    ray_launcher.PLACE_S = 2.0
    try:
        run_on_ray(ray, RayJob(command, 50, folder, logs, gpus=False), notes.append)
    except ConfigError as error:
        show("no room", str(error))
    show("free", ray.available_resources().get("CPU"))


def starts_of(rank: int) -> list[Any]:
    return read_lines(f"rank-{rank}")


def read_lines(name: str) -> list[Any]:
    return [json.loads(line) for line in Path(f"{name}.jsonl").read_text().splitlines()]


def is_alive(pid: int) -> bool:
    return stays(lambda: Path(f"/proc/{pid}").exists())


def stays(there: Callable[[], bool]) -> bool:
    """Whether it is there for 20 s."""
    deadline = time.monotonic() + 20
    while there() and time.monotonic() < deadline:
        time.sleep(0.05)
    return there()


def show(name: str, value: object) -> None:
    with open("shown.jsonl", "a") as file:  # Ray writes to standard output itself.
        file.write(json.dumps({name: value}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
