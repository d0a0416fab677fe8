"""Makes tasks from servers of others with `mtrl-train make-tasks`, and writes the reports.

python bench/made_tasks.py                  # writes bench/results/made_tasks.md
python bench/made_tasks.py --servers git    # one of them: only its part of the file changes
python bench/made_tasks.py --servers memory --n 10 --print    # smoke test

`make bench-made-tasks` installs the servers in .npm-servers and .pip-servers; MTRL_NPM and MTRL_PIP name other folders.
What they begin from is generated: 40 entities for the memory, 24 files for the file system, 40 rows for SQLite, and for
git a repository with three commits and 12 new files. Arguments that no schema tells, such as SQL, come from examples.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "made_tasks.md"
NPM = Path(os.environ.get("MTRL_NPM", ROOT / ".npm-servers")) / "node_modules" / "@modelcontextprotocol"
PIP = Path(os.environ.get("MTRL_PIP", ROOT / ".pip-servers"))
FOLDER = "${MTRL_ROLLOUT_DIR}"
REPOSITORY = "/rollout/repo"
SYLLABLES = ("ba", "ke", "lo", "mi", "nu", "ra", "se", "ti", "vo", "za")
TITLE = "# Tasks made from servers of others\n"
NO_REPORT = re.compile(r"server |written: |train on |\d+ of \d+ after ")
"""How lines of the command begin that are not of its report."""
TIMEOUT_S = 3600


def word(draw: Random) -> str:
    return "".join(draw.choice(SYLLABLES) for _ in range(3)).capitalize()


def write_memory(folder: Path, draw: Random) -> None:
    names = [word(draw) for _ in range(40)]
    kinds = ("person", "city", "ship")
    lines = [
        {"type": "entity", "name": name, "entityType": draw.choice(kinds), "observations": [word(draw)]}
        for name in names
    ]
    lines += [
        {"type": "relation", "from": draw.choice(names), "to": draw.choice(names), "relationType": "knows"}
        for _ in range(30)
    ]
    # As the server writes it: otherwise its first write changes the whole file, whatever was asked for.
    (folder / "memory.jsonl").write_text("\n".join(json.dumps(line, separators=(",", ":")) for line in lines))


def write_files(folder: Path, draw: Random) -> None:
    (folder / "docs").mkdir()
    for _ in range(12):
        (folder / f"{word(draw).lower()}.txt").write_text(f"{word(draw)}\n")
        text = f"owner: {word(draw)}\ncode: {draw.randint(100, 999)}\n"
        (folder / "docs" / f"{word(draw).lower()}.txt").write_text(text)


def write_database(folder: Path, draw: Random) -> None:
    connection = sqlite3.connect(folder / "people.db")
    connection.execute("CREATE TABLE people (name TEXT, city TEXT, age INTEGER)")
    rows = [(word(draw), word(draw), draw.randint(18, 90)) for _ in range(40)]
    connection.executemany("INSERT INTO people VALUES (?, ?, ?)", rows)
    connection.commit()
    connection.close()


def write_repository(folder: Path, draw: Random) -> None:
    repository = folder / "repo"
    when = "2026-01-01T00:00:00+0000"
    identity = {"GIT_AUTHOR_DATE": when, "GIT_COMMITTER_DATE": when, "GIT_CONFIG_GLOBAL": os.devnull}

    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(repository), *words], check=True, env=os.environ | identity, timeout=60)

    repository.mkdir()
    git("init", "--quiet", "--initial-branch", "main")
    git("config", "user.name", "Ada")
    git("config", "user.email", "ada@example.com")
    for _ in range(3):
        (repository / f"{word(draw).lower()}.txt").write_text(f"{word(draw)}\n")
        git("add", ".")
        git("commit", "--quiet", "--message", f"{word(draw)} {word(draw).lower()}")
    for _ in range(12):
        (repository / f"{word(draw).lower()}.txt").write_text(f"{word(draw)}\n")


SQL = {
    "read_query": [
        "SELECT city FROM people WHERE name = '{name}'",
        "SELECT name, age FROM people ORDER BY age DESC LIMIT 8",
        "SELECT name, city FROM people ORDER BY name LIMIT 12",
        "SELECT age FROM people WHERE city = '{city}'",
    ],
    "write_query": [
        "INSERT INTO people VALUES ('{+name}', '{city}', {#age})",
        "UPDATE people SET city = '{+city}' WHERE name = '{name}'",
        "DELETE FROM people WHERE name = '{name}'",
    ],
    "create_table": ["CREATE TABLE {+table} (name TEXT, {+column} INTEGER)"],
}
GIT: Mapping[str, Mapping[str, Any]] = {
    "git_status": {},
    "git_log": {"max_count": 2},
    "git_add": {"files": ["{file}"]},
    "git_reset": {},
    "git_commit": {"message": "{+message}"},
    "git_create_branch": {"branch_name": "{+branch}"},
    "git_checkout": {"branch_name": "{branch}"},
    "git_branch": {"branch_type": "local"},
    "git_show": {"revision": "HEAD"},
    "git_diff_staged": {},
}


@dataclass(frozen=True)
class ServerOfOthers:
    """A server, how it is started, and what it begins from."""

    package: str
    args: tuple[str, ...]
    write_state: Callable[[Path, Random], None]
    tasks: int
    env: Mapping[str, str] = field(default_factory=dict)
    examples: tuple[Mapping[str, Any], ...] = ()
    is_npm: bool = False

    @property
    def command(self) -> list[str]:
        if not self.is_npm:
            return [str(PIP / self.package / "bin" / self.package), *self.args]
        node = shutil.which("node")
        if node is None:
            raise SystemExit("Node.js is not installed")
        return [node, str(NPM / self.package / "dist" / "index.js"), *self.args]

    @property
    def version(self) -> str:
        """The installed version."""
        if self.is_npm:
            return str(json.loads((NPM / self.package / "package.json").read_text())["version"])
        program = f"from importlib.metadata import version; print(version({self.package!r}))"
        return subprocess.check_output(
            [PIP / self.package / "bin" / "python", "-c", program], text=True, timeout=60
        ).strip()


SERVERS = {
    "memory": ServerOfOthers(
        "server-memory", (), write_memory, 48, {"MEMORY_FILE_PATH": f"{FOLDER}/memory.jsonl"}, is_npm=True
    ),
    "filesystem": ServerOfOthers("server-filesystem", (FOLDER,), write_files, 48, is_npm=True),
    "sqlite": ServerOfOthers(
        "mcp-server-sqlite", ("--db-path", f"{FOLDER}/people.db"), write_database, 20,
        examples=tuple({"tool": tool, "arguments": {"query": query}} for tool in SQL for query in SQL[tool]),
    ),
    "git": ServerOfOthers(
        "mcp-server-git", ("--repository", f"{FOLDER}/repo"), write_repository, 20,
        examples=tuple({"tool": tool, "arguments": {"repo_path": REPOSITORY, **GIT[tool]}} for tool in GIT),
    ),
}  # fmt: skip


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--n", type=int, help="tasks of each server; without it, as many as are recorded")
    options.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    options.add_argument("--print", action="store_true", help="write no file")
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in args.servers:
            text = make_section(Path(folder), name, args.n or SERVERS[name].tasks)
            print(text, flush=True)
            if not args.print:
                RESULTS.write_text(put_section(RESULTS.read_text(), text))
    return 0


def put_section(page: str, section: str) -> str:
    """The page with a server's section in place of its earlier one; sections are in the order of SERVERS."""
    sections = [part.rstrip() for part in re.split(r"\n(?=## )", page)[1:]] + [section.rstrip()]
    by_package = {part.split("`")[1]: part for part in sections}
    ordered = [by_package[server.package] for server in SERVERS.values() if server.package in by_package]
    return "\n\n".join([TITLE.rstrip(), *ordered]) + "\n"


def make_section(folder: Path, name: str, n: int) -> str:
    """Makes the tasks; returns the report with an example of each level."""
    server = SERVERS[name]
    (folder / name).mkdir()
    server.write_state(folder / name, Random(1))
    program, *arguments = server.command
    entry = {"command": program, "args": arguments, "env": dict(server.env), "isolation": "process", "state": name}
    (folder / f"{name}.json").write_text(json.dumps({"mcpServers": {name: entry}}))
    out = folder / f"{name}.jsonl"
    command = [sys.executable, "-m", "trainer.cli", "make-tasks", "--mcp", str(folder / f"{name}.json")]
    command += ["--server", name, "--n", str(n), "--out", str(out)]
    if server.examples:
        file = folder / f"{name}.examples.jsonl"
        file.write_text("".join(json.dumps(example) + "\n" for example in server.examples))
        command += ["--examples", str(file)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    lines = [line.rstrip() for line in done.stdout.splitlines() if not NO_REPORT.match(line)]
    body = "\n".join([*lines, "", *examples(out)])
    date = datetime.now(UTC).date().isoformat()
    return f"## `{server.package}` {server.version}\n\nMade on {date}.\n\n{body}\n"


def examples(out: Path) -> list[str]:
    """The last task of each level."""
    rows = {row["level"]: row for row in map(json.loads, out.read_text().splitlines())}
    lines = ["```text"]
    for level in sorted(rows):
        right = rows[level].get("ground_truth", "the state at the end")
        lines += [f"level {level}: {rows[level]['prompt']}", f"right: {right}", ""]
    return [*lines[:-1], "```"]


if __name__ == "__main__":
    raise SystemExit(main())
