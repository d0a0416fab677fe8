"""Makes tasks from servers of others with `mtrl-train make-tasks`, and writes the reports.

python bench/made_tasks.py                  # writes bench/results/made_tasks.md
python bench/made_tasks.py --n 10 --servers memory    # smoke test; prints only

`make bench-made-tasks` installs the servers in .npm-servers; MTRL_NPM names another folder with node_modules. What they
begin from is generated: 40 entities for the memory, 24 files for the file system.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "made_tasks.md"
MODULES = Path(os.environ.get("MTRL_NPM", ROOT / ".npm-servers")) / "node_modules" / "@modelcontextprotocol"
FOLDER = "${MTRL_ROLLOUT_DIR}"
SERVERS = {
    "memory": ("server-memory", [], {"MEMORY_FILE_PATH": f"{FOLDER}/memory.jsonl"}),
    "filesystem": ("server-filesystem", [FOLDER], {}),
}
SYLLABLES = ("ba", "ke", "lo", "mi", "nu", "ra", "se", "ti", "vo", "za")
TIMEOUT_S = 3600


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--n", type=int, default=48)
    options.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    args = options.parse_args()
    texts = ["# Tasks made from servers of others\n"]
    with tempfile.TemporaryDirectory() as folder:
        for name in args.servers:
            texts.append(f"## `{SERVERS[name][0]}` {read_version(name)}\n\n{make_tasks(Path(folder), name, args.n)}")
            print(texts[-1], flush=True)
    if set(args.servers) == set(SERVERS):
        RESULTS.write_text("\n".join(texts))
    return 0


def read_version(name: str) -> str:
    """The installed version of a server."""
    version: str = json.loads((MODULES / SERVERS[name][0] / "package.json").read_text())["version"]
    return version


def make_tasks(folder: Path, name: str, n: int) -> str:
    """Makes the tasks; returns the report with an example of each level."""
    node, (module, args, env) = shutil.which("node"), SERVERS[name]
    if node is None:
        raise SystemExit("Node.js is not installed")
    write_state(folder / name, name)
    program = MODULES / module / "dist" / "index.js"
    entry = {"command": node, "args": [str(program), *args], "env": env, "isolation": "process", "state": name}
    (folder / f"{name}.json").write_text(json.dumps({"mcpServers": {name: entry}}))
    out = folder / f"{name}.jsonl"
    command = [sys.executable, "-m", "trainer.cli", "make-tasks", "--mcp", str(folder / f"{name}.json")]
    command += ["--server", name, "--n", str(n), "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    skipped = ("written:", "train on")
    lines = [line for line in done.stdout.splitlines() if not line.startswith(skipped)]
    body = [line.rstrip() for line in lines if " tasks: " not in line]
    return "\n".join([*body, "", *examples(out)]) + "\n"


def examples(out: Path) -> list[str]:
    """The last task of each level."""
    rows = {row["level"]: row for row in map(json.loads, out.read_text().splitlines())}
    lines = ["```text"]
    for level in sorted(rows):
        right = rows[level].get("ground_truth", "the state at the end")
        lines += [f"level {level}: {rows[level]['prompt']}", f"right: {right}", ""]
    return [*lines[:-1], "```"]


def write_state(folder: Path, name: str) -> None:
    """What the server begins from."""
    draw = Random(1)
    folder.mkdir()

    def word() -> str:
        return "".join(draw.choice(SYLLABLES) for _ in range(3)).capitalize()

    if name == "memory":
        names = [word() for _ in range(40)]
        lines = [
            {
                "type": "entity",
                "name": one,
                "entityType": draw.choice(("person", "city", "ship")),
                "observations": [word()],
            }
            for one in names
        ]
        lines += [
            {"type": "relation", "from": draw.choice(names), "to": draw.choice(names), "relationType": "knows"}
            for _ in range(30)
        ]
        (folder / "memory.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return
    (folder / "docs").mkdir()
    for _ in range(12):
        (folder / f"{word().lower()}.txt").write_text(f"{word()}\n")
        (folder / "docs" / f"{word().lower()}.txt").write_text(f"owner: {word()}\ncode: {draw.randint(100, 999)}\n")


if __name__ == "__main__":
    raise SystemExit(main())
