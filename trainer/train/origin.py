"""Where a run comes from: the command, machine and commit that started it, and copies of the files that it uses.

    RUN/origin/origin.json     command, folder, time, machine, user, git commit
    RUN/origin/files/          run file, tools, servers' scripts, rewards, interactions, small data: as in that folder
    RUN/origin/model/          the model that training started from, if it is small

Files from outside the folder in which the run was started are below `files/outside/`. `handover.py` uses the copies
where the originals are gone.
"""

from __future__ import annotations

import getpass
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from platform import node
from typing import TYPE_CHECKING, Any

from gateway.disk_errors import write_atomically
from trainer.train.hidden_secrets import hide_in_words
from trainer.train.origin_files import MAX_BYTES, TOO_LARGE, copy_files, describe_copy_error

if TYPE_CHECKING:
    from trainer.train.job import Job

ORIGIN_FOLDER, ORIGIN_FILE, FILES, MODEL = "origin", "origin.json", "files", "model"
GIT_S = 5.0


def read_origin(run: Path) -> Mapping[str, Any]:
    """What is known of a run's start; empty for runs of older versions."""
    try:
        origin = json.loads((run / ORIGIN_FOLDER / ORIGIN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return origin if isinstance(origin, dict) else {}


def write_origin(run: Path, job: Job, run_file: Path | None) -> None:
    """Writes the origin of a run that starts in the working folder."""
    folder, here = run / ORIGIN_FOLDER, Path.cwd()
    shutil.rmtree(folder, ignore_errors=True)
    (folder / FILES).mkdir(parents=True)
    left_out = copy_files(job, run_file, folder / FILES, run)
    if problem := _copy_model(job.model, folder / MODEL):
        left_out[str(job.model.absolute())] = problem
    origin = {
        "command": hide_in_words(sys.argv),
        "folder": str(here),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": node(),
        "user": _user_name(),
        "git": describe_commit(here),
        "run_file": None if run_file is None else str(run_file.absolute()),
        "not_copied": left_out,
    }
    write_atomically(folder / ORIGIN_FILE, (json.dumps(origin, indent=2) + "\n").encode())


def _copy_model(model: Path, target: Path) -> str:
    """Copies the model that training starts from; returns why it was not copied, if it was not."""
    if target.resolve().is_relative_to(model.resolve()):
        return "the run is inside of its folder"
    try:
        if sum(file.stat().st_size for file in model.rglob("*") if os.path.isfile(file)) > MAX_BYTES:
            return TOO_LARGE
        shutil.copytree(
            model, target, copy_function=shutil.copyfile, ignore=shutil.ignore_patterns("optimizer*", "*.distcp", ".*")
        )
    except OSError as error:
        shutil.rmtree(target, ignore_errors=True)
        return describe_copy_error(error)
    return ""


def describe_commit(folder: Path) -> Mapping[str, Any] | None:
    """The commit of the repository that a folder is in, and whether files of it differ."""
    try:
        commit = _run_git(folder, "rev-parse", "HEAD")
        return {"commit": commit, "has_changes": bool(_run_git(folder, "status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _run_git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
    done = subprocess.run(  # noqa: S603
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=GIT_S, check=True, env=environment
    )
    return done.stdout.strip()


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # A container's user may have no name.
        return str(os.getuid())
