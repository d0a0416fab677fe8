"""Writes made tasks in Harbor's format: the server by its URL, and tests that compare a file with the answer.

The server's state is out of the tests' reach, so that only tasks with an answer, whose calls change nothing, are
written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from gateway.errors import ConfigError
from mtrl_plugins.task_maker.make_tasks import MadeTask
from mtrl_plugins.task_maker.output import format_yaml
from mtrl_plugins.task_maker.questions import ANSWER_FORM
from mtrl_plugins.task_maker.server_sessions import Server

ANSWER_FILE = "/app/answer.txt"
CONFIG = f"""\
schema_version = "1.4"
artifacts = ["{ANSWER_FILE}"]

[metadata]
level = {{level}}

[environment]
docker_image = "debian:12-slim"
workdir = "/app"

[[environment.mcp_servers]]
name = {{name}}
transport = "streamable-http"
url = {{url}}

[verifier]
environment_mode = "separate"
timeout_sec = 60.0
"""
TESTS = f"""\
#!/bin/sh
# The answer counts whatever its case, and however wide its spaces are.
plain() {{ tr -s '[:space:]' ' ' < "$1" | tr '[:upper:]' '[:lower:]' | sed 's/^ //; s/ $//'; }}
reward=0
if [ -f {ANSWER_FILE} ] && [ ! -L {ANSWER_FILE} ]; then
    said=$(plain {ANSWER_FILE})
    if [ -n "$said" ] && [ "$said" = "$(plain /tests/expected.txt)" ]; then reward=1; fi
fi
echo "$reward" > /logs/verifier/reward.txt
"""
RUN_FILE = """\
# Trains on tasks of the server `{name}` in Harbor's format, made by `mtrl-train make-tasks`. Each rollout has a session
# of its own at {url}:
#   mtrl-gateway serve --mcp {mcp}
#   mtrl-train --config {file} --model MODEL_FOLDER
environment:
  name: {train}
  mcp_hosts: [{host}]
{held_out}steps: 100
prompts: 16
n: 8
limits: {{turn_tokens: 512, rollout_tokens: 8192}}
algorithm: {{name: dapo}}
"""


def check_harbor(url: str, server: Server) -> None:
    """Raises ConfigError where tasks of a server cannot be played with it at a URL."""
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        remedy = "write where the server is reached over streamable HTTP, such as http://127.0.0.1:8000/mcp"
        raise ConfigError(f"is {url!r}", field="--harbor", remedy=remedy)
    if server.states != ("",):
        remedy = "give the server one `state` instead of `states`"
        raise ConfigError(
            "a Harbor task cannot say which of the `states` it begins from", field="--harbor", remedy=remedy
        )


def write_harbor_tasks(out: Path, made: Sequence[MadeTask], server: Server, mcp: Path, url: str) -> list[Path]:
    """Writes a directory for each task, below `train` and `held_out`, and a run file; returns their paths."""
    folders: dict[str, Path] = {}
    for number, task in enumerate(made):
        folders[task.chain.split] = out / task.chain.split
        for name, text in _write_files(task, server, url).items():
            file = out / task.chain.split / f"{server.name}-{number:04}" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            file.chmod(0o755 if name.endswith(".sh") else 0o644)
    run_file = out.with_suffix(".yaml")
    held_out = f"  held_out: {format_yaml(folders['held_out'])}\n" if "held_out" in folders else ""
    values = {"train": f"harbor:{folders.get('train', out)}", "host": urlsplit(url).netloc.rpartition("@")[2]}
    text = RUN_FILE.format(
        name=server.name, url=url, mcp=mcp, file=run_file, held_out=held_out,
        **{name: json.dumps(value) for name, value in values.items()},
    )  # fmt: skip
    run_file.write_text(text, encoding="utf-8")
    return [*folders.values(), run_file]


def _write_files(task: MadeTask, server: Server, url: str) -> Mapping[str, str]:
    """The files of a task, by their path in its directory."""
    chain = task.chain
    answer = chain.answer.text if chain.answer else ""
    names = {"name": server.name, "url": url}
    values = {name: json.dumps(value, ensure_ascii=False) for name, value in names.items()}
    calls = "".join(f"# {step.tool} {json.dumps(step.arguments)}\n" for step in chain.steps)
    return {
        "task.toml": CONFIG.format(level=chain.level, **values),
        "instruction.md": f"{task.question.removesuffix(ANSWER_FORM)} Write it, and nothing else, to {ANSWER_FILE}.\n",
        "tests/test.sh": TESTS,
        "tests/expected.txt": f"{answer}\n",
        "solution/solve.sh": f"#!/bin/sh\n# What these calls find:\n{calls}cp /solution/expected.txt {ANSWER_FILE}\n",
        "solution/expected.txt": f"{answer}\n",
    }
